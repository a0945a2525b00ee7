//! Types of what lies in device memory.

use std::fmt;
use std::marker::PhantomData;

use half::{bf16, f16};

/// Type of the elements of a device array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// bfloat16.
    Bf16,
    /// IEEE 754 half precision.
    F16,
    /// IEEE 754 single precision.
    F32,
    /// Signed, 8 bits.
    I8,
    /// Unsigned, 8 bits.
    U8,
    /// Signed, 16 bits.
    I16,
    /// Unsigned, 16 bits.
    U16,
    /// Signed, 32 bits.
    I32,
    /// Unsigned, 32 bits.
    U32,
    /// Signed, 64 bits.
    I64,
    /// Unsigned, 64 bits.
    U64,
}

impl DType {
    /// Triton's name, which the manifest uses.
    pub fn name(self) -> &'static str {
        match self {
            DType::Bf16 => "bf16",
            DType::F16 => "fp16",
            DType::F32 => "fp32",
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::I16 => "i16",
            DType::U16 => "u16",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::I64 => "i64",
            DType::U64 => "u64",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type whose values a device array can hold.
pub trait Element: sealed::Sealed + Copy + fmt::Debug + 'static {
    /// Which one it is.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($element:ty: $dtype:ident),*) => {$(
        impl sealed::Sealed for $element {}
        impl Element for $element {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements!(bf16: Bf16, f16: F16, f32: F32, i8: I8, u8: U8, i16: I16, u16: U16, i32: I32);
elements!(u32: U32, i64: I64, u64: U64);

/// Address in device memory of an array of `T`.
///
/// Only an address: it owns nothing and may be null.
#[repr(transparent)]
pub struct DevicePtr<T> {
    address: u64,
    element: PhantomData<fn() -> T>,
}

impl<T> DevicePtr<T> {
    /// The array at that address.
    pub const fn new(address: u64) -> Self {
        DevicePtr { address, element: PhantomData }
    }

    /// For an argument that the kernel does not read.
    pub const fn null() -> Self {
        DevicePtr::new(0)
    }

    /// The address.
    pub const fn address(self) -> u64 {
        self.address
    }
}

impl<T> Clone for DevicePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DevicePtr<T> {}

impl<T: Element> fmt::Debug for DevicePtr<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "*{} {:#x}", T::DTYPE, self.address)
    }
}
