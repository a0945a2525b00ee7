//! `strftime_now`: the date and time of a moment, in UTC, as C's `strftime` writes them.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

const DAYS: [&str; 7] =
    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// The longest format, in bytes; no directive writes more than a few dozen.
pub const MAX_FORMAT_BYTES: usize = 1000;

/// A moment in UTC, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DateTime {
    year: i64,
    /// 1 to 12.
    month: usize,
    /// 1 to 31.
    day: u64,
    /// Of the year, from 1.
    year_day: u64,
    /// Monday is 0.
    weekday: usize,
    hour: u64,
    minute: u64,
    second: u64,
    microsecond: u32,
}

impl DateTime {
    pub fn new(time: SystemTime) -> Self {
        let (seconds, microsecond) = match time.duration_since(UNIX_EPOCH) {
            Ok(after) => (after.as_secs(), after.subsec_micros()),
            // A clock before 1970 is not set; the day does not matter then.
            Err(_) => (0, 0),
        };
        let days = seconds / 86_400;
        let (year, month, day) = civil(days as i64);
        let first = days_from_civil(year);
        Self {
            year,
            month,
            day,
            year_day: (days as i64 - first) as u64 + 1,
            // 1970 began on a Thursday.
            weekday: ((days + 3) % 7) as usize,
            hour: seconds / 3600 % 24,
            minute: seconds / 60 % 60,
            second: seconds % 60,
            microsecond,
        }
    }

    /// Writes the moment; an unknown directive is an error that names it.
    pub fn format(&self, format: &str) -> Result<String, String> {
        if format.len() > MAX_FORMAT_BYTES {
            let bytes = format.len();
            return Err(format!(
                "a time format has {bytes} bytes; the limit is {MAX_FORMAT_BYTES}"
            ));
        }
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = chars.next();
            let unpadded = directive == Some('-');
            if unpadded {
                directive = chars.next();
            }
            let text = directive.and_then(|directive| self.directive(directive));
            match text {
                Some(text) if unpadded => {
                    let digits = text.trim_start_matches(['0', ' ']);
                    out.push_str(if digits.is_empty() { "0" } else { digits });
                }
                Some(text) => out.push_str(&text),
                None => {
                    let directive = directive.map_or(String::new(), String::from);
                    return Err(format!("the time directive %{directive} is not supported"));
                }
            }
        }
        Ok(out)
    }

    fn directive(&self, directive: char) -> Option<String> {
        let hour12 = (self.hour + 11) % 12 + 1;
        let short = |name: &str| name[..3].to_owned();
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year % 100),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.year_day),
            'B' => MONTHS[self.month - 1].to_owned(),
            'b' | 'h' => short(MONTHS[self.month - 1]),
            'A' => DAYS[self.weekday].to_owned(),
            'a' => short(DAYS[self.weekday]),
            'u' => (self.weekday + 1).to_string(),
            'w' => ((self.weekday + 1) % 7).to_string(),
            'H' => format!("{:02}", self.hour),
            'I' => format!("{hour12:02}"),
            'M' => format!("{:02}", self.minute),
            'S' => format!("{:02}", self.second),
            'f' => format!("{:06}", self.microsecond),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.to_owned(),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'D' | 'x' => format!("{:02}/{:02}/{:02}", self.month, self.day, self.year % 100),
            'T' | 'X' => format!("{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
            'R' => format!("{:02}:{:02}", self.hour, self.minute),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

/// Year, month and day of a day after 1970 (Howard Hinnant, "chrono-compatible low-level date
/// algorithms": years that start in March, so that leap days come last).
fn civil(days: i64) -> (i64, usize, u64) {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month as usize, day as u64)
}

/// The day after 1970 that `year` begins on.
fn days_from_civil(year: i64) -> i64 {
    let before = year - 1;
    365 * (year - 1970) + (before / 4 - 1969 / 4) - (before / 100 - 1969 / 100)
        + (before / 400 - 1969 / 400)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn format(seconds: u64, format: &str) -> Result<String, String> {
        DateTime::new(UNIX_EPOCH + Duration::from_millis(seconds * 1000 + 7)).format(format)
    }

    #[test]
    fn known_moments() {
        let all = "%a %A %w %u|%d %-d %e|%b %B %m %-m|%y %Y|%j|%H %I %p|%M %S %f|%F %T %R %D|%%";
        // Expected: GNU date, with its %N cut to microseconds.
        let start = "Thu Thursday 4 4|01 1  1|Jan January 01 1|70 1970|001|00 12 AM|00 00 007000|\
                     1970-01-01 00:00:00 00:00 01/01/70|%";
        assert_eq!(format(0, all).unwrap(), start);
        let leap = "Thu Thursday 4 4|29 29 29|Feb February 02 2|24 2024|060|23 11 PM|59 58 007000|\
                    2024-02-29 23:59:58 23:59 02/29/24|%";
        assert_eq!(format(1_709_251_198, all).unwrap(), leap);
        assert_eq!(format(4_107_542_400, "%d %b %Y %j").unwrap(), "01 Mar 2100 060");
        assert_eq!(format(1_735_603_200, "%Y-%j %A").unwrap(), "2024-366 Tuesday");
    }

    #[test]
    fn unknown_directives_are_named() {
        assert_eq!(format(0, "a %Q").unwrap_err(), "the time directive %Q is not supported");
        assert!(format(0, "%").unwrap_err().contains("directive % is"));
        assert!(format(0, &"%Y".repeat(501)).unwrap_err().contains("1002 bytes"));
    }
}
