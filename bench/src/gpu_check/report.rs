//! What a run found, as JSON and as a table.

use quire_engine::backend::cuda::CudaDevice;
use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

/// A run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// `gpu-check`.
    pub benchmark: &'static str,
    /// Of quire.
    pub version: &'static str,
    /// A rehearsal on a stand-in driver: no figure has a value.
    pub dry_run: bool,
    /// `2026-01-31`, UTC.
    pub date: String,
    /// What ran the kernels.
    pub device: DeviceReport,
    /// What ran the host's part.
    pub host: HostReport,
    /// Seconds that the run could take.
    pub budget_s: f64,
    /// Seconds that it took.
    pub seconds: f64,
    /// No check failed, and no stage.
    pub passed: bool,
    /// In the order in which they ran.
    pub stages: Vec<StageReport>,
}

/// The device.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceReport {
    /// Its name.
    pub name: String,
    /// Compute capability, `9.0`.
    pub capability: String,
    /// The version of CUDA that the driver supports.
    pub driver: String,
    /// Bytes of its memory.
    pub memory_bytes: usize,
}

/// The host.
#[derive(Clone, Debug, Serialize)]
pub struct HostReport {
    /// Model of the processor; null where the system does not say.
    pub cpu: Option<String>,
    /// Cores that the process may use.
    pub cores: usize,
    /// Operating system and architecture.
    pub platform: String,
}

/// A stage.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StageReport {
    /// As `--only` takes it.
    pub name: &'static str,
    /// Seconds that it could take, with what earlier stages left.
    pub budget_s: f64,
    /// Seconds that it took.
    pub seconds: f64,
    /// Why it did not come to its end.
    pub error: Option<String>,
    /// What was not done, and why.
    pub left_out: Vec<String>,
    /// What had to hold.
    pub checks: Vec<Check>,
    /// What was measured.
    pub figures: Vec<Figure>,
}

/// Something that must hold.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// What.
    pub name: String,
    /// It does.
    pub passed: bool,
    /// Why not.
    pub detail: Option<String>,
    /// Seconds that it took to find out.
    pub seconds: f64,
}

/// Something measured.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Figure {
    /// What.
    pub name: String,
    /// Sizes, by name.
    pub params: Map<String, Value>,
    /// Milliseconds that one took; null where it is no time, and in a dry run.
    pub ms: Option<f64>,
    /// The figure; null in a dry run.
    pub value: Option<f64>,
    /// Of `value` and `ceiling`.
    pub unit: &'static str,
    /// The best that `value` could be; null where there is no bound.
    pub ceiling: Option<f64>,
    /// What bounds it.
    pub ceiling_of: Option<&'static str>,
    /// 100 · value / ceiling.
    pub percent: Option<f64>,
    /// What is aimed at, in `unit`.
    pub aim: Option<f64>,
}

impl Figure {
    /// A figure without a value yet; `params` are an object.
    pub fn new(name: impl Into<String>, unit: &'static str, params: Value) -> Self {
        let Value::Object(params) = params else { panic!("{params} is no object") };
        Figure { name: name.into(), unit, params, ..Figure::default() }
    }

    /// With a value.
    pub fn value(self, value: f64) -> Self {
        Figure { value: Some(value), ..self }.with_percent()
    }

    /// With the time that one took.
    pub fn ms(self, ms: f64) -> Self {
        Figure { ms: Some(ms), ..self }
    }

    /// With what bounds it.
    pub fn ceiling(self, ceiling: Option<f64>, of: &'static str) -> Self {
        let ceiling_of = ceiling.map(|_| of);
        Figure { ceiling, ceiling_of, ..self }.with_percent()
    }

    /// With what is aimed at.
    pub fn aim(self, aim: f64) -> Self {
        Figure { aim: Some(aim), ..self }
    }

    /// With what is aimed at, in percent of the ceiling.
    pub fn aim_percent(self, percent: f64) -> Self {
        Figure { aim: self.ceiling.map(|ceiling| ceiling * percent / 100.0), ..self }
    }

    fn with_percent(mut self) -> Self {
        let ceiling = self.ceiling.filter(|&ceiling| ceiling > 0.0);
        self.percent = self.value.zip(ceiling).map(|(value, ceiling)| 100.0 * value / ceiling);
        self
    }

    /// The same without any number that a clock gave.
    pub fn without_times(self) -> Self {
        let Figure { name, params, unit, .. } = self;
        Figure { name, params, unit, ..Figure::default() }
    }
}

impl StageReport {
    /// Whether everything that had to hold did.
    pub fn passed(&self) -> bool {
        self.error.is_none() && self.checks.iter().all(|check| check.passed)
    }
}

impl From<&CudaDevice> for DeviceReport {
    fn from(device: &CudaDevice) -> Self {
        DeviceReport {
            name: device.name.clone(),
            capability: device.capability.clone(),
            driver: device.driver.to_string(),
            memory_bytes: device.memory.total,
        }
    }
}

impl HostReport {
    /// This one.
    pub fn here() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
        HostReport {
            cpu: model.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned())),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            platform: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        }
    }
}

impl Report {
    /// The name of its file: `gpu-check-nvidia-h200-2026-01-31.json`.
    pub fn file_name(&self) -> String {
        let name = self.device.name.to_lowercase();
        let words =
            name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        let words: Vec<&str> = words.collect();
        format!("gpu-check-{}-{}.json", words.join("-"), self.date)
    }

    /// The report to be read.
    pub fn table(&self) -> String {
        let DeviceReport { name, capability, driver, .. } = &self.device;
        let mut text = format!("{name}, compute capability {capability}, CUDA {driver}");
        if self.dry_run {
            text.push_str("; dry run: nothing was measured");
        }
        text.push('\n');
        for stage in &self.stages {
            let (seconds, budget) = (stage.seconds, stage.budget_s);
            let _ = writeln!(text, "\n{} ({seconds:.1} of {budget:.0} s)", stage.name);
            stage.write(&mut text, self.dry_run);
        }
        let checks = || self.stages.iter().flat_map(|stage| &stage.checks);
        let failed = checks().filter(|check| !check.passed).count();
        let ended = self.stages.iter().filter(|stage| stage.error.is_some()).count();
        let (count, seconds) = (checks().count(), self.seconds);
        let _ = writeln!(
            text,
            "\n{count} checks, {failed} failed; {} stages, {ended} ended early; {seconds:.0} s",
            self.stages.len(),
        );
        text
    }
}

impl StageReport {
    fn write(&self, text: &mut String, dry_run: bool) {
        for Check { name, passed, detail, .. } in &self.checks {
            let _ = writeln!(text, "  {} {name}", if *passed { "ok    " } else { "FAILED" });
            if let Some(detail) = detail {
                let _ = writeln!(text, "         {detail}");
            }
        }
        let header = ["", "", "", "ceiling", "%", "aim"].map(str::to_owned);
        let rows = self.figures.iter().map(|figure| figure.cells(dry_run));
        let rows: Vec<_> = std::iter::once(header).chain(rows).collect();
        if rows.len() > 1 {
            text.push_str(&aligned(&rows));
        }
        for what in &self.left_out {
            let _ = writeln!(text, "  left out: {what}");
        }
        if let Some(error) = &self.error {
            let _ = writeln!(text, "  FAILED: {error}");
        }
    }
}

impl Figure {
    fn cells(&self, dry_run: bool) -> [String; 6] {
        let mut name = self.name.clone();
        for (param, value) in &self.params {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let _ = write!(name, ", {param} {value}");
        }
        let shown = |value: Option<f64>| value.map(number).unwrap_or_default();
        let value = if dry_run { "dry run".to_owned() } else { shown(self.value) };
        let percent = self.percent.map(|percent| format!("{percent:.1}")).unwrap_or_default();
        [name, value, self.unit.to_owned(), shown(self.ceiling), percent, shown(self.aim)]
    }
}

/// Three digits at least, no fraction beyond what that takes.
fn number(value: f64) -> String {
    let decimals = match value.abs() {
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    format!("{value:.decimals$}")
}

/// Names and units to the left, numbers to the right.
fn aligned(rows: &[[String; 6]]) -> String {
    let width = |i: usize| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0);
    let widths: [usize; 6] = std::array::from_fn(width);
    let mut text = String::new();
    for row in rows {
        let mut line = String::from(" ");
        for (i, (cell, width)) in row.iter().zip(widths).enumerate() {
            let _ = match i {
                0 | 2 => write!(line, " {cell:width$}"),
                _ => write!(line, " {cell:>width$}"),
            };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// Today, UTC.
pub fn today() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    date((now.as_secs() / 86_400) as i64)
}

/// The date that many days after 1970-01-01, in the Gregorian calendar (Hinnant, "chrono-compatible
/// low-level date algorithms", `civil_from_days`).
fn date(days: i64) -> String {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Months counted from March.
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (year, month) =
        if month < 10 { (year_of_era, month + 3) } else { (year_of_era + 1, month - 9) };
    format!("{:04}-{month:02}-{day:02}", era * 400 + year)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn days_are_dates() {
        for (days, text) in [
            (0, "1970-01-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (20_788, "2026-12-01"),
            (-1, "1969-12-31"),
        ] {
            assert_eq!(date(days), text);
        }
    }

    fn report(dry_run: bool) -> Report {
        let figure = Figure::new("decode", "GB/s", json!({"batch": 8, "of": "x"}))
            .ceiling(Some(4000.0), "copy bandwidth")
            .ms(0.5)
            .value(3000.0)
            .aim_percent(85.0);
        let none = Figure::new("fold", "%", json!({}));
        let figures = vec![if dry_run { figure.without_times() } else { figure }, none];
        let check = Check {
            name: "alone".into(),
            passed: false,
            detail: Some("a token".into()),
            seconds: 1.0,
        };
        let stage = StageReport {
            name: "attention",
            budget_s: 9.0,
            checks: vec![check],
            figures,
            left_out: vec!["32768 keys: no memory".into()],
            ..Default::default()
        };
        Report {
            benchmark: "gpu-check",
            version: "1",
            dry_run,
            date: "2026-01-31".into(),
            device: DeviceReport {
                name: "NVIDIA H200 (SXM)".into(),
                capability: "9.0".into(),
                driver: "12.4".into(),
                memory_bytes: 1,
            },
            host: HostReport::here(),
            budget_s: 9.0,
            seconds: 2.0,
            passed: stage.passed(),
            stages: vec![stage],
        }
    }

    #[test]
    fn the_table_has_every_number() {
        let report = report(false);
        assert_eq!(report.file_name(), "gpu-check-nvidia-h200-sxm-2026-01-31.json");
        assert_eq!(
            report.table(),
            "NVIDIA H200 (SXM), compute capability 9.0, CUDA 12.4\n\
             \n\
             attention (0.0 of 9 s)\n  FAILED alone\n         a token\n                                  \
             ceiling    %  aim\n  decode, batch 8, of x 3000 GB/s    4000 75.0 3400\n  \
             fold                       %\n  left out: 32768 keys: no memory\n\
             \n\
             1 checks, 1 failed; 1 stages, 0 ended early; 2 s\n"
        );
    }

    #[test]
    fn a_dry_run_claims_nothing() {
        let report = report(true);
        let text = report.table();
        assert!(text.contains("dry run: nothing was measured"), "{text}");
        assert!(!text.contains("3000") && !text.contains("4000"), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        let figure = &json["stages"][0]["figures"][0];
        for field in ["value", "ms", "ceiling", "percent"] {
            assert!(figure[field].is_null(), "{figure}");
        }
        assert_eq!((&json["dry_run"], &json["passed"]), (&json!(true), &json!(false)));
    }

    #[test]
    fn a_ceiling_of_nothing_has_no_percentage() {
        let figure = Figure::new("x", "GB/s", json!({})).value(1.0);
        assert_eq!(figure.clone().ceiling(Some(0.0), "y").percent, None);
        assert_eq!(figure.ceiling(None, "y").ceiling_of, None);
    }
}
