//! Where a benchmark ran.

use crate::size::parse_size;
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

/// Sizes in bytes of the caches of the first core; `None` where the system does not say.
#[derive(Clone, Copy, Debug, Default)]
pub struct Caches {
    /// Of a core.
    pub l2: Option<usize>,
    /// Of several cores together.
    pub l3: Option<usize>,
}

/// Those of this machine.
pub fn caches() -> Caches {
    let size = |level: usize| {
        // Levels 2 and 3 come after the two caches of level 1, for data and for code.
        let folder = format!("/sys/devices/system/cpu/cpu0/cache/index{level}");
        let read = |file: &str| std::fs::read_to_string(format!("{folder}/{file}")).ok();
        let is_level = read("level")?.trim().parse() == Ok(level);
        parse_size(read("size")?.trim()).ok().filter(|_| is_level)
    };
    Caches { l2: size(2), l3: size(3) }
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
