//! What the driver pretends to be.

use serde::{Deserialize, Serialize};

/// When work that was put into a stream runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// As late as the driver's guarantees allow.
    #[default]
    Lazy,
    /// At once.
    Eager,
}

/// A device and a driver.
///
/// A program finds it in environment variables, a test sets it with
/// [`FakeCuda::load`](crate::FakeCuda::load):
///
/// | variable | meaning | default |
/// | --- | --- | --- |
/// | `FAKECUDA_ORDER` | `lazy` or `eager` | `lazy` |
/// | `FAKECUDA_DEVICE_BYTES` | memory of each device | 4294967296 |
/// | `FAKECUDA_COUNT` | number of devices | 1 |
/// | `FAKECUDA_CC` | compute capability, `8.6` | `8.0` |
/// | `FAKECUDA_DRIVER_VERSION` | `12040` for 12.4 | `12040` |
/// | `FAKECUDA_FAIL` | `alloc:3:2,launch:10:700`: the third allocation and the tenth launch fail | |
/// | `FAKECUDA_STATS` | file that gets the [`Stats`](crate::Stats) as JSON at exit | |
/// | `FAKECUDA_NULL` | `1`: nothing runs | |
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// Memory of each device, in bytes.
    pub device_bytes: usize,
    /// Number of devices, all alike.
    pub num_devices: usize,
    /// Major and minor.
    pub compute_capability: (u32, u32),
    /// 1000 × major + 10 × minor.
    pub driver_version: u32,
    /// When work runs.
    pub order: Order,
    /// Launches, copies and memsets are counted and do nothing.
    pub null: bool,
    /// Number of multiprocessors.
    pub num_multiprocessors: u32,
    /// Name of the device.
    pub name: String,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            device_bytes: 4 << 30,
            num_devices: 1,
            compute_capability: (8, 0),
            driver_version: 12040,
            order: Order::Lazy,
            null: false,
            num_multiprocessors: 108,
            name: "Fake CUDA device".into(),
        }
    }
}

impl Config {
    /// The configuration and the failures that `variable` (by name, such as `FAKECUDA_ORDER`) asks
    /// for.
    ///
    /// # Errors
    /// Names the variable whose value means nothing.
    pub(crate) fn from_variables(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<(Config, Vec<Failure>), String> {
        let default = Config::default();
        let order = parsed(&variable, "FAKECUDA_ORDER", |text| match text {
            "lazy" => Some(Order::Lazy),
            "eager" => Some(Order::Eager),
            _ => None,
        })?;
        let bytes = parsed(&variable, "FAKECUDA_DEVICE_BYTES", |text| text.parse().ok())?;
        let count = parsed(&variable, "FAKECUDA_COUNT", |text| text.parse().ok())?;
        let version = parsed(&variable, "FAKECUDA_DRIVER_VERSION", |text| text.parse().ok())?;
        let null = parsed(&variable, "FAKECUDA_NULL", |text| Some(text == "1"))?;
        let capability = parsed(&variable, "FAKECUDA_CC", |text| {
            let (major, minor) = text.split_once('.')?;
            Some((major.parse().ok()?, minor.parse().ok()?))
        })?;
        let failures = parsed(&variable, "FAKECUDA_FAIL", |text| {
            text.split(',').map(Failure::parse).collect::<Option<Vec<_>>>()
        })?;
        let config = Config {
            device_bytes: bytes.unwrap_or(default.device_bytes),
            num_devices: count.unwrap_or(default.num_devices),
            compute_capability: capability.unwrap_or(default.compute_capability),
            driver_version: version.unwrap_or(default.driver_version),
            order: order.unwrap_or(default.order),
            null: null.unwrap_or(default.null),
            ..default
        };
        Ok((config, failures.unwrap_or_default()))
    }

    /// The newest version of PTX that the driver compiles: major and minor.
    pub(crate) fn ptx_version(&self) -> (u32, u32) {
        match (self.driver_version / 1000, self.driver_version % 1000 / 10) {
            (11, minor) => (7, minor.min(8)),
            (12, minor @ 0..=5) => (8, minor),
            // 12.6 brought no new version of PTX.
            (12, minor) => (8, minor - 1),
            (major, minor) => (major - 4, minor),
        }
    }

    /// Dynamic shared memory that a block may have once it asks for it, in bytes.
    pub(crate) fn max_shared_bytes(&self) -> usize {
        let kib = match self.compute_capability {
            (0..=6, _) => 48,
            (7, 5) => 64,
            (7, _) => 96,
            (8, 0 | 7) => 163,
            (8, _) | (12.., _) => 99,
            (9..=11, _) => 227,
        };
        kib * 1024
    }
}

fn parsed<T>(
    variable: impl Fn(&str) -> Option<String>,
    name: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, String> {
    let Some(text) = variable(name).filter(|text| !text.is_empty()) else { return Ok(None) };
    let value = parse(&text).ok_or_else(|| format!("{name}={text} means nothing"))?;
    Ok(Some(value))
}

/// A kind of driver call that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// An allocation of device memory.
    Alloc,
    /// An allocation of page-locked host memory.
    HostAlloc,
    /// A kernel launch, captured ones included.
    Launch,
    /// A copy in any direction.
    Copy,
    /// The launch of a graph.
    GraphLaunch,
    /// Loading PTX.
    ModuleLoad,
    /// Waiting for a stream, an event or the context.
    Sync,
}

/// A failure to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub call: Call,
    /// How many calls of that kind are left until it fails, that one included.
    pub nth: u64,
    pub code: i32,
}

impl Failure {
    /// `call:nth:code`.
    fn parse(text: &str) -> Option<Failure> {
        let mut parts = text.split(':');
        let call = match parts.next()? {
            "alloc" => Call::Alloc,
            "host_alloc" => Call::HostAlloc,
            "launch" => Call::Launch,
            "copy" => Call::Copy,
            "graph_launch" => Call::GraphLaunch,
            "module_load" => Call::ModuleLoad,
            "sync" => Call::Sync,
            _ => return None,
        };
        let nth = parts.next()?.parse().ok().filter(|&nth| nth > 0)?;
        let code = parts.next()?.parse().ok().filter(|&code| code > 0)?;
        parts.next().is_none().then_some(Failure { call, nth, code })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_set_what_they_name() {
        let variables = |name: &str| {
            let value = match name {
                "FAKECUDA_ORDER" => "eager",
                "FAKECUDA_DEVICE_BYTES" => "1000",
                "FAKECUDA_CC" => "8.6",
                "FAKECUDA_FAIL" => "alloc:3:2,graph_launch:10:700",
                _ => return None,
            };
            Some(value.to_owned())
        };
        let (config, failures) = Config::from_variables(variables).unwrap();
        let wanted = Config {
            order: Order::Eager,
            device_bytes: 1000,
            compute_capability: (8, 6),
            ..Config::default()
        };
        assert_eq!(config, wanted);
        let alloc = Failure { call: Call::Alloc, nth: 3, code: 2 };
        let launch = Failure { call: Call::GraphLaunch, nth: 10, code: 700 };
        assert_eq!(failures, [alloc, launch]);
    }

    #[test]
    fn a_meaningless_variable_is_named() {
        for (name, value) in [
            ("FAKECUDA_ORDER", "sometimes"),
            ("FAKECUDA_CC", "8"),
            ("FAKECUDA_COUNT", "-1"),
            ("FAKECUDA_FAIL", "alloc:0:2"),
            ("FAKECUDA_FAIL", "alloc:1"),
            ("FAKECUDA_FAIL", "alloc:1:2:3"),
        ] {
            let error = Config::from_variables(|asked| (asked == name).then(|| value.to_owned()));
            assert_eq!(error.unwrap_err(), format!("{name}={value} means nothing"));
        }
    }

    #[test]
    fn drivers_know_the_ptx_of_their_time() {
        for (driver, ptx) in [
            (11080, (7, 8)),
            (12000, (8, 0)),
            (12040, (8, 4)),
            (12060, (8, 5)),
            (12080, (8, 7)),
            (13000, (9, 0)),
        ] {
            let config = Config { driver_version: driver, ..Config::default() };
            assert_eq!(config.ptx_version(), ptx, "driver {driver}");
        }
    }
}
