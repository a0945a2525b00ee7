//! The Rust source that `src/launch.rs` includes: a launch struct for each kernel, and the tables
//! `KERNELS`, `TEXTS` and `TARGETS`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use anyhow::Result;

use super::manifest::{Arg, Kernel, Manifest, Variant, find_type, parse_target};
use super::pack::{Packed, PackedKernel};

/// The two scratch pointers at the end of every kernel's parameters.
const SCRATCH_PARAMS: usize = 2;

/// The source. It names the types of the crate without a path.
pub fn generate(manifest: &Manifest, packed: &Packed) -> Result<String> {
    let mut out = String::new();
    for (index, kernel) in manifest.kernels.iter().enumerate() {
        out += &launch_struct(kernel, index)?;
    }
    let most = manifest.kernels.iter().map(|kernel| kernel.args.len()).max().unwrap_or(0);
    writeln!(out, "pub(crate) const MAX_PARAMS: usize = {};", most + SCRATCH_PARAMS)?;
    out += &targets(manifest)?;

    writeln!(out, "static TEXTS: [Text; {}] = [", packed.kernels.len())?;
    for PackedKernel { compressed, text_bytes, .. } in &packed.kernels {
        writeln!(out, "    Text::new({}, {}, {text_bytes}),", compressed.start, compressed.end)?;
    }
    writeln!(out, "];")?;

    writeln!(out, "pub(crate) static KERNELS: [Kernel; {}] = [", manifest.kernels.len())?;
    for (index, (kernel, packed)) in manifest.kernels.iter().zip(&packed.kernels).enumerate() {
        out += &kernel_entry(kernel, packed, index)?;
    }
    writeln!(out, "];")?;
    Ok(out)
}

/// The struct with a kernel's arguments.
fn launch_struct(kernel: &Kernel, index: usize) -> Result<String> {
    let name = camel(&kernel.name);
    let variables = kernel.variables();
    let list = |item: fn(&str) -> String| match variables.is_empty() {
        true => String::new(),
        false => format!("<{}>", variables.iter().map(|v| item(v)).collect::<Vec<_>>().join(", ")),
    };
    let bounds = list(|variable| format!("{}: Element", camel(variable)));
    let parameters = list(camel);

    let mut out = String::new();
    writeln!(out, "/// {}\n///", escape(&kernel.why))?;
    writeln!(out, "/// The arguments of `{}.{}`.", kernel.family, kernel.name)?;
    writeln!(out, "#[derive(Clone, Copy, Debug)]\npub struct {name}{bounds} {{")?;
    for arg in &kernel.args {
        writeln!(out, "    /// {}", field_doc(arg))?;
        writeln!(out, "    pub {}: {},", arg.field(), rust_type(arg)?)?;
    }
    writeln!(out, "}}\nimpl{bounds} Launch for {name}{parameters} {{")?;
    writeln!(out, "    const TYPES: &'static [(&'static str, DType)] = &[")?;
    for variable in &variables {
        writeln!(out, "        ({variable:?}, {}::DTYPE),", camel(variable))?;
    }
    writeln!(out, "    ];")?;
    writeln!(out, "    fn kernel() -> &'static Kernel {{\n        &KERNELS[{index}]\n    }}")?;
    writeln!(out, "    fn push_args(&self, params: &mut Params) {{")?;
    for arg in &kernel.args {
        writeln!(out, "        params.push(self.{});", arg.field())?;
    }
    writeln!(out, "    }}\n}}")?;
    Ok(out)
}

/// The row of `KERNELS`.
fn kernel_entry(kernel: &Kernel, packed: &PackedKernel, index: usize) -> Result<String> {
    let Kernel { name, family, why, .. } = kernel;
    let mut out = String::new();
    writeln!(out, "    Kernel {{\n        name: {name:?}, family: {family:?}, why: {why:?},")?;
    writeln!(out, "        args: &[")?;
    for arg in &kernel.args {
        let Arg { ptr, hint, .. } = arg;
        let name = arg.field();
        // All pointers have one size, whatever they point to.
        let sized = if *ptr { "DevicePtr<u8>" } else { &rust_type(arg)? };
        writeln!(
            out,
            "            Arg {{ name: {name:?}, pointer: {ptr}, size: size_of::<{sized}>(), \
             multiple: {hint:?} }},"
        )?;
    }
    writeln!(out, "        ],\n        variants: &[")?;
    for (variant, range) in kernel.variants.iter().zip(&packed.variants) {
        let types = rows(&variant.types, |value| Ok(format!("DType::{}", find_type(value)?.1)))?;
        let constants = rows(&variant.constexpr, |value| Ok(value.number().to_string()))?;
        let Variant { name, target, ptx_version, entry, .. } = variant;
        let Variant { num_warps, num_stages, shared_bytes, reqntid, .. } = variant;
        writeln!(
            out,
            "            Variant {{ name: {name:?}, target: {target:?}, \
             ptx_version: {ptx_version}, entry: {entry:?}, types: &[{types}], \
             constants: &[{constants}], num_warps: {num_warps}, num_stages: {num_stages}, \
             shared_bytes: {shared_bytes}, num_threads: {reqntid}, text: &TEXTS[{index}], \
             start: {}, end: {} }},",
            range.start, range.end
        )?;
    }
    writeln!(out, "        ],\n    }},")?;
    Ok(out)
}

/// `TARGETS`: every target of the manifest, the more specific first.
fn targets(manifest: &Manifest) -> Result<String> {
    let variants = manifest.kernels.iter().flat_map(|kernel| &kernel.variants);
    let names: BTreeSet<&str> = variants.map(|variant| variant.target.as_str()).collect();
    let mut targets = Vec::new();
    for name in names {
        let (major, minor, exact) = parse_target(name)?;
        targets.push((exact, major, minor, name));
    }
    targets.sort();
    let mut out = format!("pub(crate) static TARGETS: [Target; {}] = [\n", targets.len());
    for (exact, major, minor, name) in targets.iter().rev() {
        writeln!(
            out,
            "    Target {{ name: {name:?}, \
             capability: ComputeCapability {{ major: {major}, minor: {minor} }}, exact: {exact} }},"
        )?;
    }
    writeln!(out, "];")?;
    Ok(out)
}

/// `("NAME", value), …` with the values spelt by `spell`.
fn rows<T>(map: &BTreeMap<String, T>, spell: impl Fn(&T) -> Result<String>) -> Result<String> {
    let row = |(name, value): (&String, &T)| Ok(format!("({name:?}, {})", spell(value)?));
    Ok(map.iter().map(row).collect::<Result<Vec<_>>>()?.join(", "))
}

/// The type of an argument's field.
fn rust_type(arg: &Arg) -> Result<String> {
    let element = match arg.variable() {
        Some(variable) => camel(variable),
        None => find_type(&arg.dtype)?.2.to_owned(),
    };
    Ok(if arg.ptr { format!("DevicePtr<{element}>") } else { element })
}

/// What the manifest says about an argument, and what it promises.
fn field_doc(arg: &Arg) -> String {
    let doc = if arg.doc.is_empty() { format!("`{}`", arg.name) } else { escape(&arg.doc) };
    match arg.hint {
        Some(multiple) if arg.ptr => format!("{doc}. Aligned to {multiple} bytes."),
        Some(multiple) => format!("{doc}. A multiple of {multiple}."),
        None => format!("{doc}."),
    }
}

/// `snake_case` as `CamelCase`.
fn camel(name: &str) -> String {
    let capital = |part: &str| part[..1].to_uppercase() + &part[1..];
    name.split('_').filter(|part| !part.is_empty()).map(capital).collect()
}

/// Plain text as Markdown on one line, without links and tags; code in backticks stays.
fn escape(text: &str) -> String {
    let mut out = String::new();
    for (index, part) in text.split('`').enumerate() {
        out += if index == 0 { "" } else { "`" };
        for c in part.chars() {
            if index % 2 == 0 && "[]<>*".contains(c) {
                out.push('\\');
            }
            out.push(if c == '\n' { ' ' } else { c });
        }
    }
    out
}
