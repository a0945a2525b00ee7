//! The parameters of a launch in the form that the driver takes.

use std::ffi::c_void;
use std::fmt;

use crate::element::{DevicePtr, Element};
use crate::kernel::{Arg, Kernel};
use crate::launch::MAX_PARAMS;

/// The parameters of one launch, in the order of the kernel's `.entry`: the arguments, then the
/// pointers to global and profile scratch memory, which are null.
///
/// Each has a slot of 8 bytes and begins with it; the driver copies as many bytes as the entry
/// declares.
#[derive(Clone, Debug)]
pub struct Params {
    slots: [u64; MAX_PARAMS],
    len: usize,
}

/// A value that can be a kernel's argument: a device pointer or a number.
pub(crate) trait Number: Copy {
    /// The value at the start of a slot, as it lies in memory; the rest is zero.
    fn slot(self) -> u64;
}

impl<T: Element> Number for DevicePtr<T> {
    fn slot(self) -> u64 {
        self.address()
    }
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Number for $number {
            fn slot(self) -> u64 {
                let mut slot = [0; size_of::<u64>()];
                slot[..size_of::<Self>()].copy_from_slice(&self.to_ne_bytes());
                u64::from_ne_bytes(slot)
            }
        }
    )*};
}

numbers!(i32, u32, i64, u64, f32);

impl Params {
    pub(crate) const fn new() -> Self {
        Params { slots: [0; MAX_PARAMS], len: 0 }
    }

    pub(crate) fn push(&mut self, value: impl Number) {
        self.slots[self.len] = value.slot();
        self.len += 1;
    }

    /// The slots.
    pub fn slots(&self) -> &[u64] {
        &self.slots[..self.len]
    }

    /// Calls `launch` with the address of each parameter, `kernelParams` of `cuLaunchKernel`.
    ///
    /// The addresses are valid until `launch` returns, and that is as long as the driver uses them.
    pub fn with_addresses<R>(&mut self, launch: impl FnOnce(&mut [*mut c_void]) -> R) -> R {
        let mut addresses = [std::ptr::null_mut(); MAX_PARAMS];
        for (address, slot) in addresses.iter_mut().zip(&mut self.slots) {
            *address = std::ptr::from_mut(slot).cast();
        }
        launch(&mut addresses[..self.len])
    }

    /// Refuses values that break a promise the kernel was compiled with.
    pub(crate) fn check(&self, kernel: &'static Kernel) -> Result<(), HintError> {
        for (arg, &slot) in kernel.args.iter().zip(&self.slots) {
            // An integer, as numbers with a promised multiple are.
            let value = if arg.size == size_of::<i32>() { low_half(slot) } else { slot as i64 };
            if arg.multiple.is_some_and(|multiple| !value.unsigned_abs().is_multiple_of(multiple)) {
                return Err(HintError { kernel: kernel.name, argument: arg, value });
            }
        }
        Ok(())
    }
}

/// The 32-bit integer at the start of a slot.
fn low_half(slot: u64) -> i64 {
    let [a, b, c, d, ..] = slot.to_ne_bytes();
    i32::from_ne_bytes([a, b, c, d]).into()
}

/// An argument is not the multiple that its kernel was compiled for.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub struct HintError {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// The argument.
    pub argument: &'static Arg,
    /// Its value; a pointer's address.
    pub value: i64,
}

impl fmt::Display for HintError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HintError { kernel, argument: Arg { name, pointer, multiple, .. }, value } = self;
        let multiple = multiple.unwrap_or(1);
        if *pointer {
            write!(f, "{kernel}: {name} is at {value:#x}, which is not aligned to {multiple} bytes")
        } else {
            write!(f, "{kernel}: {name} is {value}, which is not a multiple of {multiple}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_at_the_start_of_its_slot() {
        let mut params = Params::new();
        params.push(-2i32);
        params.push(u32::MAX);
        params.push(i64::MIN);
        params.push(u64::MAX);
        params.push(1.5f32);
        let mut expected = [[0; 8]; 5];
        expected[0][..4].copy_from_slice(&(-2i32).to_ne_bytes());
        expected[1][..4].copy_from_slice(&u32::MAX.to_ne_bytes());
        expected[2] = i64::MIN.to_ne_bytes();
        expected[3] = u64::MAX.to_ne_bytes();
        expected[4][..4].copy_from_slice(&1.5f32.to_ne_bytes());
        assert_eq!(params.slots(), expected.map(u64::from_ne_bytes));
    }
}
