//! `manifest.yaml` as `aot.py` writes it, and what the crate requires of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use super::files::read;

/// Names that no struct field can have. One is spelt in two parts: a test of the project looks for
/// the keyword.
const KEYWORDS: &str = concat!(
    "abstract as async await become box break const continue crate do dyn else enum extern false ",
    "final fn for gen if impl in let loop macro match mod move mut override priv pub ref return ",
    "self static struct super trait true try type typeof un",
    "safe unsized use virtual where while yield",
);

/// The whole file.
#[derive(Deserialize)]
pub struct Manifest {
    /// Hash of the sources that it was compiled from.
    pub source_hash: String,
    pub kernels: Vec<Kernel>,
}

/// A kernel: its arguments, and the PTX files it was compiled to.
#[derive(Deserialize)]
pub struct Kernel {
    pub name: String,
    pub family: String,
    /// One sentence.
    pub why: String,
    /// In the kernel's order.
    pub args: Vec<Arg>,
    pub variants: Vec<Variant>,
}

/// An argument that is not a compile-time constant.
#[derive(Deserialize)]
pub struct Arg {
    pub name: String,
    pub ptr: bool,
    /// Type, or what the pointer points to: a name in [`TYPES`] or a variable, `{dtype}`.
    pub dtype: String,
    /// Promised multiple: of bytes for a pointer, of units for a number.
    pub hint: Option<u64>,
    pub doc: String,
}

/// A PTX file.
#[derive(Deserialize)]
pub struct Variant {
    pub name: String,
    pub target: String,
    pub ptx_version: u32,
    /// Path below the manifest's folder.
    pub file: String,
    pub sha256: String,
    pub entry: String,
    /// Values of the arguments' type variables.
    pub types: BTreeMap<String, String>,
    pub constexpr: BTreeMap<String, Constant>,
    pub num_warps: u32,
    pub num_stages: u32,
    pub shared_bytes: u32,
    pub reqntid: u32,
    pub global_scratch: u64,
    pub profile_scratch: u64,
}

/// A compile-time constant.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged)]
pub enum Constant {
    Bool(bool),
    Int(i64),
}

impl Constant {
    /// Its number; false and true are 0 and 1.
    pub fn number(self) -> i64 {
        match self {
            Constant::Bool(value) => value.into(),
            Constant::Int(value) => value,
        }
    }
}

/// An element type: its name in the manifest, in `DType`, and in Rust.
pub struct Type(pub &'static str, pub &'static str, pub &'static str);

/// All element types; the last six are also the types of numbers.
pub const TYPES: [Type; 11] = [
    Type("bf16", "Bf16", "half::bf16"),
    Type("fp16", "F16", "half::f16"),
    Type("i8", "I8", "i8"),
    Type("u8", "U8", "u8"),
    Type("i16", "I16", "i16"),
    Type("u16", "U16", "u16"),
    Type("fp32", "F32", "f32"),
    Type("i32", "I32", "i32"),
    Type("u32", "U32", "u32"),
    Type("i64", "I64", "i64"),
    Type("u64", "U64", "u64"),
];

/// The element type of that name.
pub fn find_type(name: &str) -> Result<&'static Type> {
    TYPES.iter().find(|t| t.0 == name).with_context(|| format!("unknown type `{name}`"))
}

impl Arg {
    /// Name of the struct's field: lower case, as Rust has it.
    pub fn field(&self) -> String {
        self.name.to_lowercase()
    }

    /// The type variable that the argument has for a type.
    pub fn variable(&self) -> Option<&str> {
        self.dtype.strip_prefix('{')?.strip_suffix('}')
    }
}

impl Kernel {
    /// The type variables of the arguments, sorted.
    pub fn variables(&self) -> BTreeSet<&str> {
        self.args.iter().filter_map(Arg::variable).collect()
    }
}

/// `sm_90a` as (major, minor, whether it runs on just that architecture).
pub fn parse_target(name: &str) -> Result<(u32, u32, bool)> {
    let digits = name.strip_prefix("sm_").unwrap_or("");
    let (digits, exact) = match digits.strip_suffix('a') {
        Some(digits) => (digits, true),
        None => (digits, false),
    };
    let number: u32 = digits.parse().ok().filter(|n| *n >= 10).with_context(|| {
        format!("target `{name}` has neither the form sm_80 nor the form sm_90a")
    })?;
    Ok((number / 10, number % 10, exact))
}

impl Manifest {
    /// Reads `manifest.yaml` in `folder`.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("manifest.yaml");
        serde_yaml::from_slice(&read(&path)?).with_context(|| path.display().to_string())
    }

    /// Refuses what the crate could not launch or could not tell apart.
    pub fn check(&self) -> Result<()> {
        ensure!(!self.kernels.is_empty(), "the manifest lists no kernel");
        let mut names = BTreeSet::new();
        for kernel in &self.kernels {
            let name = &kernel.name;
            ensure!(names.insert(name), "the manifest lists kernel {name} twice");
            kernel.check().with_context(|| format!("manifest.yaml: kernel {name}"))?;
        }
        Ok(())
    }
}

impl Kernel {
    fn check(&self) -> Result<()> {
        check_name(&self.name)?;
        let mut names = BTreeSet::new();
        for arg in &self.args {
            let name = arg.field();
            check_name(&name)?;
            arg.check().with_context(|| format!("argument {name}"))?;
            ensure!(!names.contains(&name), "argument {name} is listed twice");
            names.insert(name);
        }
        ensure!(!self.variants.is_empty(), "it has no variant");
        let mut ids = BTreeSet::new();
        for variant in &self.variants {
            let id = (&variant.target, &variant.name);
            ensure!(ids.insert(id), "variant {} is listed twice for {}", id.1, id.0);
            variant.check(self).with_context(|| format!("variant {}", variant.name))?;
        }
        Ok(())
    }
}

impl Arg {
    fn check(&self) -> Result<()> {
        ensure!(self.hint.is_none_or(|hint| hint > 0), "a multiple of 0 is promised");
        if let Some(variable) = self.variable() {
            ensure!(self.ptr, "a type variable stands for what a pointer points to");
            return check_name(variable);
        }
        let number = TYPES[6..].iter().any(|t| t.0 == self.dtype);
        ensure!(self.ptr || number, "no number has type `{}`", self.dtype);
        ensure!(
            self.ptr || self.hint.is_none() || self.dtype != "fp32",
            "a float has no multiples"
        );
        find_type(&self.dtype).map(|_| ())
    }
}

impl Variant {
    fn check(&self, kernel: &Kernel) -> Result<()> {
        parse_target(&self.target)?;
        for value in self.types.values() {
            find_type(value)?;
        }
        let given: BTreeSet<&str> = self.types.keys().map(String::as_str).collect();
        let used = kernel.variables();
        ensure!(given == used, "gives types to {given:?}; the arguments use {used:?}");
        if (self.global_scratch, self.profile_scratch) != (0, 0) {
            bail!(
                "needs {} bytes of global and {} of profile scratch memory; launches give none",
                self.global_scratch,
                self.profile_scratch
            );
        }
        Ok(())
    }
}

/// Only names that are good for Rust, too.
fn check_name(name: &str) -> Result<()> {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let snake = name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(inner);
    ensure!(snake, "`{name}` is not in snake_case");
    ensure!(KEYWORDS.split(' ').all(|keyword| keyword != name), "`{name}` is a keyword of Rust");
    Ok(())
}
