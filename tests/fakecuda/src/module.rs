//! Modules: PTX text, checked against the driver and the device, and parsed once a process.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use quire_ptxsim::{Kernel, Module};

use crate::code::{self, Result};
use crate::config::Config;
use crate::driver::Driver;
use crate::work::Function;

/// Dynamic shared memory that a block has without asking for more, in bytes.
const DEFAULT_SHARED_BYTES: usize = 48 * 1024;

/// Modules by their text. Tests load the same few over and over.
static PARSED: LazyLock<Mutex<HashMap<String, Arc<Module>>>> = LazyLock::new(Mutex::default);

#[derive(Debug)]
pub(crate) struct LoadedModule {
    pub device: usize,
    module: Arc<Module>,
    /// Handles of the functions that were asked for, by name.
    functions: HashMap<String, u64>,
}

#[derive(Debug)]
pub(crate) struct LoadedFunction {
    pub device: usize,
    pub function: Function,
    /// Dynamic shared memory that a block may have, in bytes.
    pub max_shared_bytes: usize,
}

impl LoadedFunction {
    pub fn kernel(&self) -> &Kernel {
        let Function { module, entry } = &self.function;
        module.kernel(entry).expect("found when it was asked for")
    }
}

impl Driver {
    pub fn load_module(&mut self, device: usize, ptx: &str) -> Result<u64> {
        check_header(&self.config, ptx)?;
        let module = parse(ptx)?;
        let handle = self.new_handle();
        let functions = HashMap::new();
        self.modules.insert(handle, LoadedModule { device, module, functions });
        Ok(handle)
    }

    pub fn unload_module(&mut self, handle: u64, device: usize) -> Result {
        let found = self.modules.get(&handle).is_some_and(|module| module.device == device);
        let module = if found { self.modules.remove(&handle) } else { None };
        let module = module.ok_or(code::INVALID_HANDLE)?;
        module.functions.values().for_each(|function| {
            self.functions.remove(function);
        });
        Ok(())
    }

    /// The handle of a kernel of a module.
    pub fn get_function(&mut self, module: u64, name: &str, device: usize) -> Result<u64> {
        let fresh = self.new_handle();
        let found = self.modules.get_mut(&module).filter(|module| module.device == device);
        let found = found.ok_or(code::INVALID_HANDLE)?;
        if let Some(&handle) = found.functions.get(name) {
            return Ok(handle);
        }
        found.module.kernel(name).ok_or(code::NOT_FOUND)?;
        found.functions.insert(name.into(), fresh);
        let function = Function { module: found.module.clone(), entry: name.into() };
        let max_shared_bytes = DEFAULT_SHARED_BYTES;
        self.functions.insert(fresh, LoadedFunction { device, function, max_shared_bytes });
        Ok(fresh)
    }

    pub fn function(&mut self, handle: u64, device: usize) -> Result<&mut LoadedFunction> {
        let found = self.functions.get_mut(&handle).filter(|found| found.device == device);
        found.ok_or(code::INVALID_HANDLE)
    }
}

/// Parses what [`check_header`] has let pass.
fn parse(ptx: &str) -> Result<Arc<Module>> {
    let mut parsed = PARSED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(module) = parsed.get(ptx) {
        return Ok(module.clone());
    }
    let module = Module::parse(ptx).map_err(|error| {
        eprintln!("fakecuda: the PTX interpreter refuses a module: {error}");
        code::INVALID_PTX
    })?;
    let module = Arc::new(module);
    parsed.insert(ptx.into(), module.clone());
    Ok(module)
}

/// Whether this driver compiles that version of PTX, for this device.
fn check_header(config: &Config, ptx: &str) -> Result {
    let version = directive(ptx, ".version").and_then(|version| {
        let (major, minor) = version.split_once('.')?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    });
    let version = version.ok_or(code::INVALID_PTX)?;
    if version > config.ptx_version() {
        return Err(code::UNSUPPORTED_PTX_VERSION);
    }
    let target = directive(ptx, ".target").and_then(|target| target.strip_prefix("sm_"));
    let target = target.ok_or(code::INVALID_PTX)?;
    let (major, minor) = config.compute_capability;
    let device = 10 * major + minor;
    // Code for an architecture with an `a` runs on that one alone.
    if let Some(exact) = target.strip_suffix('a') {
        let fits = exact.parse() == Ok(device);
        return if fits { Ok(()) } else { Err(code::NO_BINARY_FOR_GPU) };
    }
    match target.parse::<u32>() {
        Ok(target) if target <= device => Ok(()),
        _ => Err(code::INVALID_PTX),
    }
}

/// The first word after the directive, which starts a line.
fn directive<'a>(ptx: &'a str, name: &str) -> Option<&'a str> {
    ptx.lines().find_map(|line| line.trim().strip_prefix(name)?.split_whitespace().next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_fits_the_driver_and_the_device() {
        let check = |driver_version, compute_capability, version: &str, target: &str| {
            let config = Config { driver_version, compute_capability, ..Config::default() };
            let ptx = format!("// Made\n.version {version}\n.target {target}\n.address_size 64\n");
            check_header(&config, &ptx)
        };
        assert_eq!(check(12000, (8, 0), "8.0", "sm_80"), Ok(()));
        assert_eq!(check(12000, (8, 6), "8.0", "sm_80"), Ok(()));
        assert_eq!(check(11080, (8, 0), "8.0", "sm_80"), Err(code::UNSUPPORTED_PTX_VERSION));
        assert_eq!(check(12000, (7, 5), "8.0", "sm_80"), Err(code::INVALID_PTX));
        assert_eq!(check(12000, (9, 0), "8.0", "sm_90a"), Ok(()));
        assert_eq!(check(12080, (10, 0), "8.0", "sm_90a"), Err(code::NO_BINARY_FOR_GPU));
        assert_eq!(check(12000, (8, 0), "eight", "sm_80"), Err(code::INVALID_PTX));
        assert_eq!(check(12000, (8, 0), "8.0", "x86"), Err(code::INVALID_PTX));
    }
}
