//! The driver's result codes.

use std::ffi::CStr;

/// A result code of the driver that is not success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub i32);

/// Result of a driver call.
pub type Result<T = ()> = std::result::Result<T, Code>;

macro_rules! codes {
    ($($name:ident = $value:literal: $text:literal;)+) => {
        $(pub const $name: Code = Code($value);)+

        /// Name and description of a code.
        fn lookup(code: Code) -> Option<(&'static CStr, &'static CStr)> {
            let found = match code.0 {
                0 => (c"CUDA_SUCCESS", c"no error"),
                // Returned only where a test asks for it.
                701 => (
                    c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
                    c"too many resources requested for launch",
                ),
                $($value => (name(concat!("CUDA_ERROR_", stringify!($name), "\0")), $text),)+
                _ => return None,
            };
            Some(found)
        }
    };
}

const fn name(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the name has one NUL, at its end"),
    }
}

codes! {
    INVALID_VALUE = 1: c"invalid argument";
    OUT_OF_MEMORY = 2: c"out of memory";
    NOT_INITIALIZED = 3: c"initialization error";
    NO_DEVICE = 100: c"no CUDA-capable device is detected";
    INVALID_DEVICE = 101: c"invalid device ordinal";
    INVALID_IMAGE = 200: c"device kernel image is invalid";
    INVALID_CONTEXT = 201: c"invalid device context";
    NO_BINARY_FOR_GPU = 209: c"no kernel image is available for execution on the device";
    ECC_UNCORRECTABLE = 214: c"uncorrectable ECC error encountered";
    INVALID_PTX = 218: c"a PTX JIT compilation failed";
    NVLINK_UNCORRECTABLE = 220: c"uncorrectable NVLink error detected during the execution";
    UNSUPPORTED_PTX_VERSION = 222: c"the provided PTX was compiled with an unsupported toolchain.";
    INVALID_HANDLE = 400: c"invalid resource handle";
    ILLEGAL_STATE = 401: c"the operation cannot be performed in the present state";
    NOT_FOUND = 500: c"named symbol not found";
    NOT_READY = 600: c"device not ready";
    ILLEGAL_ADDRESS = 700: c"an illegal memory access was encountered";
    LAUNCH_TIMEOUT = 702: c"the launch timed out and was terminated";
    CONTEXT_IS_DESTROYED = 709: c"context is destroyed";
    ASSERT = 710: c"device-side assert triggered";
    HARDWARE_STACK_ERROR = 714: c"hardware stack error";
    ILLEGAL_INSTRUCTION = 715: c"an illegal instruction was encountered";
    MISALIGNED_ADDRESS = 716: c"misaligned address";
    INVALID_ADDRESS_SPACE = 717: c"operation not supported on global/shared address space";
    INVALID_PC = 718: c"invalid program counter";
    LAUNCH_FAILED = 719: c"unspecified launch failure";
    NOT_SUPPORTED = 801: c"operation not supported";
    STREAM_CAPTURE_UNSUPPORTED = 900: c"operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901:
        c"operation failed due to a previous error during capture";
    STREAM_CAPTURE_MERGE = 902:
        c"operation would result in a merge of separate capture sequences";
    STREAM_CAPTURE_UNMATCHED = 903: c"capture was not ended in the same stream as it began";
    STREAM_CAPTURE_UNJOINED = 904:
        c"capturing stream has unjoined work";
    STREAM_CAPTURE_ISOLATION = 905:
        c"dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT = 906:
        c"operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907: c"operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD = 908:
        c"attempt to terminate a thread-local capture sequence from another thread";
    UNKNOWN = 999: c"unknown error";
}

impl Code {
    /// `CUDA_ERROR_…`, where the code is known.
    pub fn name(self) -> Option<&'static CStr> {
        lookup(self).map(|(name, _)| name)
    }

    /// What the driver says about it.
    pub fn description(self) -> Option<&'static CStr> {
        lookup(self).map(|(_, description)| description)
    }

    /// Whether the context is unusable once a call has returned this.
    pub fn is_sticky(self) -> bool {
        matches!(
            self,
            ECC_UNCORRECTABLE
                | NVLINK_UNCORRECTABLE
                | ILLEGAL_ADDRESS
                | LAUNCH_TIMEOUT
                | CONTEXT_IS_DESTROYED
                | ASSERT
                | HARDWARE_STACK_ERROR
                | ILLEGAL_INSTRUCTION
                | MISALIGNED_ADDRESS
                | INVALID_ADDRESS_SPACE
                | INVALID_PC
                | LAUNCH_FAILED
                | UNKNOWN
        )
    }
}
