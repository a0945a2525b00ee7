//! Where a benchmark ran.

use quire_engine::ops::BackendInfo;
use serde::Serialize;

/// The machine.
#[derive(Serialize)]
pub struct Machine {
    /// As the system names it; null where it does not.
    pub cpu: Option<String>,
    /// Cores this process may use.
    pub cores: usize,
    /// Operating system and architecture.
    pub platform: String,
    /// Processes that ran or wanted to, mean of the minute before; null where the system does
    /// not say. Far above 0, others were at work, and times are too long.
    pub load_average: Option<f64>,
}

impl Machine {
    /// This one, now.
    pub fn here() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
        let cpu = model.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned()));
        let loadavg = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        Machine {
            cpu,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            platform: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            load_average: loadavg.split(' ').next().and_then(|first| first.parse().ok()),
        }
    }
}

/// What computed, under the names of `BackendInfo`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BackendReport {
    pub name: String,
    pub isa: String,
    pub threads: usize,
    pub dtype: String,
    pub quantization: String,
    pub batch_invariant: bool,
}

impl From<BackendInfo> for BackendReport {
    fn from(info: BackendInfo) -> Self {
        BackendReport {
            name: info.name.to_owned(),
            isa: info.isa,
            threads: info.threads,
            dtype: info.dtype.to_string(),
            quantization: info.quantization.to_string(),
            batch_invariant: info.batch_invariant,
        }
    }
}
