//! How a test gets the driver into its process, sets it up, and looks inside.

use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::{env, fs, io};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use serde::{Deserialize, Serialize};

use crate::config::{Call, Config, Failure};
use crate::stats::{LaunchRecord, Stats};

/// File name of the driver. Not the name that programs look for: Cargo puts its folder on the path
/// of the dynamic loader, and every `cargo run` would find a GPU.
const FILE_NAME: &str = "libfakecuda.so";

/// An empty library with the name of cuBLASLt that depends on the driver, in which its functions
/// are found. The build script makes it.
const CUBLASLT: &str = concat!(env!("OUT_DIR"), "/libcublasLt.so");

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    Reset(Config),
    Fail(Failure),
    Stats,
    LogLaunches(bool),
    TakeLaunches,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    Done,
    Stats(Stats),
    Launches(Vec<LaunchRecord>),
}

/// The functions that the driver exports for tests.
struct Loaded {
    control: unsafe extern "C" fn(*const c_char) -> *mut c_char,
    free: unsafe extern "C" fn(*mut c_char),
}

/// The driver of this process. One test has it at a time; the others wait in
/// [`load`](FakeCuda::load).
pub struct FakeCuda {
    _alone: MutexGuard<'static, ()>,
}

impl FakeCuda {
    /// Loads the driver, if it is not loaded yet, and resets it to `config`. From then on, whoever
    /// asks the dynamic loader for `libcuda.so` gets it.
    ///
    /// # Panics
    /// Where the driver was not built: Cargo builds it for a crate that depends on this one.
    pub fn load(config: &Config) -> FakeCuda {
        static ALONE: Mutex<()> = Mutex::new(());
        // A test that failed leaves nothing behind that the reset does not clear.
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let fake = FakeCuda { _alone: alone };
        fake.reset(config);
        fake
    }

    /// A new machine: no allocations, streams or errors; the counts start from 0. Nothing of the
    /// old one may be used any more, and no other thread may be in a call.
    pub fn reset(&self, config: &Config) {
        ask(&Request::Reset(config.clone()));
    }

    /// The `nth` next call of that kind, from 1, returns the CUDA error `code`. Errors after which a
    /// context is unusable make it so.
    pub fn fail(&self, call: Call, nth: u64, code: i32) {
        assert!(nth > 0 && code > 0, "failure {code} of call {nth}");
        ask(&Request::Fail(Failure { call, nth, code }));
    }

    /// What is alive, and what has run since the last reset.
    pub fn stats(&self) -> Stats {
        match ask(&Request::Stats) {
            Reply::Stats(stats) => stats,
            reply => unreachable!("{reply:?}"),
        }
    }

    /// Begins a new log of the kernels that run, or ends it.
    pub fn log_launches(&self, on: bool) {
        ask(&Request::LogLaunches(on));
    }

    /// The kernels that have run since the log began or was last taken, in order.
    pub fn take_launches(&self) -> Vec<LaunchRecord> {
        match ask(&Request::TakeLaunches) {
            Reply::Launches(launches) => launches,
            reply => unreachable!("{reply:?}"),
        }
    }

    /// Makes cuBLASLt loadable too, for the rest of the process: whoever asks for `libcublasLt.so`
    /// gets the part of it that is here.
    pub fn load_cublaslt(&self) {
        static LOADED: OnceLock<()> = OnceLock::new();
        LOADED.get_or_init(|| {
            // SAFETY: the library has no code of its own, and is never closed.
            let library = unsafe { Library::open(Some(CUBLASLT), RTLD_NOW | RTLD_LOCAL) };
            std::mem::forget(library.unwrap_or_else(|error| panic!("{CUBLASLT}: {error}")));
        });
    }

    /// A folder for `LD_LIBRARY_PATH`: a program that is started with it finds the driver and
    /// cuBLASLt, both of which are the same file. It is made below `parent`.
    ///
    /// # Errors
    /// Where the file system refuses it.
    pub fn library_folder(parent: &Path) -> io::Result<PathBuf> {
        let folder = parent.join("fakecuda");
        fs::create_dir_all(&folder)?;
        for name in ["libcuda.so", "libcublasLt.so"] {
            match std::os::unix::fs::symlink(library_path(), folder.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        Ok(folder)
    }
}

/// Where Cargo has put the driver: `target/PROFILE/deps`, where tests and benches are too, while
/// binaries are one folder above. The file has no hash in its name. A second name of it in
/// `target/PROFILE`, there once it was built for its own sake, may be out of date.
fn library_path() -> PathBuf {
    let program = env::current_exe().expect("the program knows its file");
    let folder = program.parent().expect("a file is in a folder");
    let candidates = [folder.join(FILE_NAME), folder.join("deps").join(FILE_NAME)];
    let found = candidates.iter().rfind(|path| path.is_file());
    found.unwrap_or_else(|| panic!("none of {candidates:?} is there")).clone()
}

fn loaded() -> &'static Loaded {
    static LOADED: OnceLock<Loaded> = OnceLock::new();
    LOADED.get_or_init(|| {
        let path = library_path();
        let open = || -> Result<Loaded, libloading::Error> {
            // SAFETY: the library runs no code when it is loaded. The types are those of its
            // functions, in `api::control`. It is never closed.
            unsafe {
                let library = Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL)?;
                let control = *library.get(b"fakecuda_control\0")?;
                let free = *library.get(b"fakecuda_free\0")?;
                std::mem::forget(library);
                Ok(Loaded { control, free })
            }
        };
        open().unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    })
}

fn ask(request: &Request) -> Reply {
    let Loaded { control, free } = loaded();
    let request = serde_json::to_vec(request).expect("a request is plain data");
    let request = CString::new(request).expect("JSON has no NUL");
    // SAFETY: the request is a string with a NUL; the reply is one, is given back once, and is not
    // used after that.
    unsafe {
        let reply = control(request.as_ptr());
        let parsed = serde_json::from_slice(CStr::from_ptr(reply).to_bytes());
        free(reply);
        parsed.expect("a reply of the same version")
    }
}
