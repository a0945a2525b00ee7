//! The kernels of `kernels-ptx`, launched as shipped in the PTX interpreter.
//!
//! [`Kernels`] is the manifest, [`Variant`] one PTX file with its launch interface, [`Gpu`] memory
//! and the launches on it. A launch names its arguments; names, order, types and the promised
//! multiples of 16 are checked as the launcher has to check them. [`recorded`] lists launches.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use quire_ptxsim::{Arg, CtaOrder, Launch, Memory, Module, Options, Profile, SimError, launch};
use serde::Deserialize;

/// Target that the interpreter runs.
pub const TARGET: &str = "sm_80";

/// `kernels-ptx/manifest.yaml`.
#[derive(Debug, Deserialize)]
pub struct Kernels {
    kernels: Vec<KernelEntry>,
}

/// One kernel of the manifest.
#[derive(Debug, Deserialize)]
pub struct KernelEntry {
    /// Name of the kernel.
    pub name: String,
    /// Folder of its source.
    pub family: String,
    args: Vec<ArgEntry>,
    /// Its PTX files, of all targets.
    pub variants: Vec<VariantEntry>,
}

#[derive(Debug, Deserialize)]
struct ArgEntry {
    name: String,
    ptr: bool,
    dtype: String,
    hint: Option<u64>,
}

/// One PTX file of the manifest.
#[derive(Debug, Deserialize)]
pub struct VariantEntry {
    /// Unique within its target.
    pub name: String,
    /// Architecture that it is compiled for.
    pub target: String,
    file: PathBuf,
    entry: String,
    types: BTreeMap<String, String>,
    constexpr: BTreeMap<String, serde_yaml::Value>,
    shared_bytes: usize,
    reqntid: u32,
    global_scratch: u64,
    profile_scratch: u64,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels-ptx")
}

impl Kernels {
    /// Reads the manifest.
    pub fn load() -> Self {
        let path = root().join("manifest.yaml");
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        serde_yaml::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    /// All kernels.
    pub fn iter(&self) -> impl Iterator<Item = &KernelEntry> {
        self.kernels.iter()
    }

    /// The variants of a kernel that the interpreter runs: at least one.
    pub fn variants(&self, kernel: &str) -> Vec<Variant<'_>> {
        let entry = self.kernels.iter().find(|entry| entry.name == kernel);
        let entry = entry.unwrap_or_else(|| panic!("the manifest has no kernel {kernel}"));
        let variants = entry.variants.iter().filter(|variant| variant.target == TARGET);
        let found: Vec<_> = variants.map(|variant| Variant::load(entry, variant)).collect();
        assert!(!found.is_empty(), "{kernel} has no variant for {TARGET}");
        found
    }

    /// The only variant of a kernel.
    pub fn only(&self, kernel: &str) -> Variant<'_> {
        let mut variants = self.variants(kernel);
        assert_eq!(variants.len(), 1, "{kernel} has several variants");
        variants.remove(0)
    }

    /// The only variant of a kernel for an element type.
    pub fn of(&self, kernel: &str, element: Element) -> Variant<'_> {
        let mut variants = self.variants(kernel);
        variants.retain(|variant| variant.element() == element);
        assert_eq!(variants.len(), 1, "variants of {kernel} for {element}");
        variants.remove(0)
    }
}

/// Element type of a variant's `dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Element::F32 => "fp32",
            Element::F16 => "fp16",
            Element::Bf16 => "bf16",
        })
    }
}

impl Element {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        if self == Element::F32 { 4 } else { 2 }
    }

    /// Spacing of its values at 1.
    pub fn ulp(self) -> f64 {
        match self {
            Element::F32 => 2f64.powi(-23),
            Element::F16 => 2f64.powi(-10),
            Element::Bf16 => 2f64.powi(-7),
        }
    }

    /// The nearest value of this type.
    pub fn round(self, x: f32) -> f32 {
        match self {
            Element::F32 => x,
            Element::F16 => f16::from_f32(x).to_f32(),
            Element::Bf16 => bf16::from_f32(x).to_f32(),
        }
    }

    /// Values rounded to this type, as memory holds them.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        let values = values.iter();
        match self {
            Element::F32 => values.flat_map(|x| x.to_le_bytes()).collect(),
            Element::F16 => values.flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
            Element::Bf16 => values.flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        }
    }

    /// The values that memory holds.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        let two = |pair: &[u8]| [pair[0], pair[1]];
        match self {
            Element::F32 => words(bytes).into_iter().map(f32::from_bits).collect(),
            Element::F16 => {
                bytes.chunks_exact(2).map(|x| f16::from_le_bytes(two(x)).to_f32()).collect()
            }
            Element::Bf16 => {
                bytes.chunks_exact(2).map(|x| bf16::from_le_bytes(two(x)).to_f32()).collect()
            }
        }
    }
}

/// Little-endian 32-bit words.
pub fn words(bytes: &[u8]) -> Vec<u32> {
    let word = |word: &[u8]| u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
    bytes.chunks_exact(4).map(word).collect()
}

/// A PTX file, parsed, and how to launch it.
#[derive(Debug)]
pub struct Variant<'a> {
    kernel: &'a KernelEntry,
    entry: &'a VariantEntry,
    module: Module,
    trusted: bool,
}

impl<'a> Variant<'a> {
    fn load(kernel: &'a KernelEntry, entry: &'a VariantEntry) -> Self {
        let path = root().join(&entry.file);
        let ptx = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Variant::from_ptx(kernel, entry, &ptx)
    }

    fn from_ptx(kernel: &'a KernelEntry, entry: &'a VariantEntry, ptx: &str) -> Self {
        let module = Module::parse(ptx).unwrap_or_else(|e| panic!("{}: {e}", entry.file.display()));
        let scratch = (entry.global_scratch, entry.profile_scratch);
        assert_eq!(scratch, (0, 0), "{} needs scratch memory", entry.name);
        Variant { kernel, entry, module, trusted: false }
    }

    /// Its text.
    pub fn ptx(&self) -> String {
        let path = root().join(&self.entry.file);
        fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    /// The same kernel with other text.
    pub fn with_ptx(&self, ptx: &str) -> Variant<'a> {
        Variant::from_ptx(self.kernel, self.entry, ptx)
    }

    /// The same without a check of the promised multiples.
    pub fn trusting(self) -> Variant<'a> {
        Variant { trusted: true, ..self }
    }

    /// Name in the PTX of an argument.
    pub fn param(&self, name: &str) -> String {
        let index = self.kernel.args.iter().position(|arg| arg.name == name);
        let index = index.unwrap_or_else(|| panic!("{} has no {name}", self.kernel.name));
        format!("{}_param_{index}", self.entry.entry)
    }

    /// Its unique name.
    pub fn name(&self) -> &str {
        &self.entry.name
    }

    /// What `dtype` is here, if the kernel has one.
    fn typed(&self) -> Option<Element> {
        self.entry.types.get("dtype").map(|name| match name.as_str() {
            "fp32" => Element::F32,
            "fp16" => Element::F16,
            "bf16" => Element::Bf16,
            other => panic!("{}: dtype is {other:?}", self.entry.name),
        })
    }

    /// What `dtype` is here.
    pub fn element(&self) -> Element {
        self.typed().unwrap_or_else(|| panic!("{} has no dtype", self.entry.name))
    }

    /// A constant of the kernel.
    pub fn constant(&self, name: &str) -> usize {
        let value = self.entry.constexpr.get(name);
        let number = value.and_then(|value| value.as_u64().or(value.as_bool().map(u64::from)));
        let number = number.unwrap_or_else(|| panic!("{}: {name} is {value:?}", self.entry.name));
        usize::try_from(number).expect("a small constant")
    }

    /// The arguments in the kernel's order, checked against its interface.
    fn args(&self, named: &[(&str, Value)]) -> Vec<Arg> {
        let wanted: Vec<&str> = self.kernel.args.iter().map(|arg| arg.name.as_str()).collect();
        let given: Vec<&str> = named.iter().map(|(name, _)| *name).collect();
        assert_eq!(given, wanted, "arguments of {}", self.entry.name);
        let one = |(arg, (_, value)): (&ArgEntry, &(&str, Value))| {
            let dtype = match arg.dtype.strip_prefix('{').and_then(|t| t.strip_suffix('}')) {
                Some(variable) => &self.entry.types[variable],
                None => &arg.dtype,
            };
            let what = || format!("{}: {} = {value:?}", self.entry.name, arg.name);
            let (typed, number) = match (arg.ptr, dtype.as_str(), *value) {
                (true, _, Value::Ptr(address)) => (Arg::Pointer(address), address),
                (false, "i32", Value::Int(x)) => {
                    (Arg::I32(i32::try_from(x).unwrap_or_else(|_| panic!("{}", what()))), x as u64)
                }
                (false, "fp32", Value::Float(x)) => (Arg::F32(x), 0),
                _ => panic!("{}, which is a {dtype}", what()),
            };
            let multiple = self.trusted || arg.hint.is_none_or(|hint| number.is_multiple_of(hint));
            assert!(multiple, "{} is no multiple of {:?}", what(), arg.hint);
            typed
        };
        let mut args: Vec<Arg> = self.kernel.args.iter().zip(named).map(one).collect();
        // Scratch memory, of which none is needed.
        args.extend([Arg::Pointer(0), Arg::Pointer(0)]);
        args
    }
}

/// An argument of a launch.
#[derive(Clone, Copy, Debug)]
pub enum Value {
    /// Address of device memory.
    Ptr(u64),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f32),
}

impl From<u64> for Value {
    fn from(address: u64) -> Self {
        Value::Ptr(address)
    }
}

impl From<usize> for Value {
    fn from(value: usize) -> Self {
        Value::Int(value as i64)
    }
}

impl From<i32> for Value {
    fn from(value: i32) -> Self {
        Value::Int(value.into())
    }
}

impl From<f32> for Value {
    fn from(value: f32) -> Self {
        Value::Float(value)
    }
}

/// `args![out, x, width: 64]`: named arguments; a name alone is a variable of that name.
#[macro_export]
macro_rules! args {
    ($($name:ident $(: $value:expr)?),* $(,)?) => {
        &[$((stringify!($name), $crate::args!(@value $name $(: $value)?))),*]
    };
    (@value $name:ident) => { $crate::ptx::Value::from($name) };
    (@value $name:ident : $value:expr) => { $crate::ptx::Value::from($value) };
}

/// A launch that [`recorded`] saw.
#[derive(Debug)]
pub struct Launched {
    /// `<family>.<name>` of the kernel.
    pub kernel: String,
    /// Name of the variant.
    pub variant: String,
    /// Bytes of an element of the variant's type; 4 where it has none.
    pub element_bytes: usize,
    /// What it did.
    pub profile: Profile,
}

thread_local! {
    static RECORD: RefCell<Option<Vec<Launched>>> = const { RefCell::new(None) };
}

/// Runs `work` and lists what this thread launched meanwhile, on whatever device.
pub fn recorded(work: impl FnOnce()) -> Vec<Launched> {
    RECORD.set(Some(Vec::new()));
    work();
    RECORD.take().expect("still recording")
}

/// Device memory and launches on it.
#[derive(Debug, Default)]
pub struct Gpu {
    /// The memory.
    pub memory: Memory,
    /// Order of the blocks of each launch.
    pub order: CtaOrder,
}

impl Gpu {
    /// An empty device.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty device whose launches run their blocks in this order.
    pub fn ordered(order: CtaOrder) -> Self {
        Gpu { order, ..Self::default() }
    }

    /// Floats, rounded to the type.
    pub fn floats(&mut self, name: &str, element: Element, values: &[f32]) -> u64 {
        self.memory.alloc(name, &element.encode(values))
    }

    /// 32-bit integers.
    pub fn i32s(&mut self, name: &str, values: &[i32]) -> u64 {
        self.memory.alloc(name, &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Unsigned 32-bit integers.
    pub fn u32s(&mut self, name: &str, values: &[u32]) -> u64 {
        self.memory.alloc(name, &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    /// 64-bit integers.
    pub fn i64s(&mut self, name: &str, values: &[i64]) -> u64 {
        self.memory.alloc(name, &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Memory that must be written before it is read.
    pub fn empty(&mut self, name: &str, bytes: usize) -> u64 {
        self.memory.alloc_uninit(name, bytes)
    }

    /// `count` floats of a type, all of which must have been written.
    pub fn read(&self, address: u64, element: Element, count: usize) -> Vec<f32> {
        element.decode(self.bytes(address, count * element.bytes()))
    }

    /// `count` 32-bit integers.
    pub fn read_i32s(&self, address: u64, count: usize) -> Vec<i32> {
        words(self.bytes(address, 4 * count)).into_iter().map(|word| word as i32).collect()
    }

    /// `count` 64-bit integers.
    pub fn read_i64s(&self, address: u64, count: usize) -> Vec<i64> {
        let long = |pair: &[u32]| (u64::from(pair[1]) << 32 | u64::from(pair[0])) as i64;
        words(self.bytes(address, 8 * count)).chunks_exact(2).map(long).collect()
    }

    /// Bytes that have been written.
    pub fn bytes(&self, address: u64, count: usize) -> &[u8] {
        self.memory.read(address, count).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Runs a kernel; a fault is a panic with its message.
    pub fn launch(&mut self, variant: &Variant<'_>, grid: &[usize], args: &[(&str, Value)]) {
        let result = self.try_launch(variant, grid, args);
        result.unwrap_or_else(|e| panic!("{}: {e}", variant.name()));
    }

    /// Runs a kernel.
    pub fn try_launch(
        &mut self,
        variant: &Variant<'_>,
        grid: &[usize],
        args: &[(&str, Value)],
    ) -> Result<(), SimError> {
        let size = |axis: usize| grid.get(axis).map_or(1, |&n| u32::try_from(n).expect("a grid"));
        let launched = Launch {
            entry: &variant.entry.entry,
            grid: [size(0), size(1), size(2)],
            block: [variant.entry.reqntid, 1, 1],
            dynamic_shared: variant.entry.shared_bytes,
            args: &variant.args(args),
        };
        let options = Options { order: self.order, ..Options::default() };
        let profile = launch(&variant.module, &launched, &mut self.memory, &options)?;
        RECORD.with_borrow_mut(|record| {
            if let Some(launches) = record {
                launches.push(Launched {
                    kernel: format!("{}.{}", variant.kernel.family, variant.kernel.name),
                    variant: variant.name().to_owned(),
                    element_bytes: variant.typed().map_or(4, Element::bytes),
                    profile,
                });
            }
        });
        Ok(())
    }
}
