//! Sizes in bytes, as people write them.

/// Reads `512M`, `2GiB`, `1GB` or plain bytes. K, M, G and T, alone or with `iB`, count in 1024s;
/// with `B` in 1000s.
pub fn parse_size(text: &str) -> Result<usize, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim_start().to_ascii_lowercase();
    let (prefix, base) = match unit.as_str() {
        "" | "b" => ("", 1),
        unit => match unit.strip_suffix("ib") {
            Some(prefix) if !prefix.is_empty() => (prefix, 1024),
            _ => unit.strip_suffix('b').map_or((unit, 1024), |prefix| (prefix, 1000)),
        },
    };
    let power = ["", "k", "m", "g", "t"].iter().position(|&p| p == prefix);
    let (Some(power), false) = (power, number.is_empty()) else {
        return Err("expected bytes, as in 536870912, 512M or 2GiB".to_owned());
    };
    let scale = usize::checked_pow(base, power as u32);
    let bytes = number.parse::<usize>().ok().zip(scale).and_then(|(n, s)| n.checked_mul(s));
    bytes.ok_or_else(|| format!("is over the largest size, {} bytes", usize::MAX))
}

/// `bytes` in the largest unit that leaves a number of at least 1.
pub fn format_size(bytes: usize) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let power = (bytes.max(1).ilog2() / 10).min(4);
    if power == 0 {
        return crate::output::counted(bytes as u64, "byte");
    }
    format!("{:.1} {}", bytes as f64 / 1024f64.powi(power as i32), units[power as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        for (text, bytes) in [
            ("0", 0),
            ("123", 123),
            ("7B", 7),
            ("1k", 1024),
            ("512M", 512 << 20),
            ("2GiB", 2 << 30),
            ("2 GiB", 2 << 30),
            ("3GB", 3_000_000_000),
            ("1T", 1 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "GiB", "-1", "1.5G", "1X", "1iBB", "1ib", "99999999999T", "1e9"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_in_a_fitting_unit() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1, "1 byte"),
            (1023, "1023 bytes"),
            (1024, "1.0 KiB"),
            (3 << 29, "1.5 GiB"),
        ] {
            assert_eq!(format_size(bytes), text);
        }
    }
}
