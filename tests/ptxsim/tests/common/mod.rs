//! Small kernels put together line by line.
#![allow(dead_code, reason = "each test file uses a part")]

use quire_ptxsim::{Arg, FaultKind, Launch, Memory, Module, Options, Profile, SimError, launch};

pub const LANES: usize = 32;

/// SplitMix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// A kernel text around `body`. Parameters: pointers `p0` and `p1`, a 32-bit `n`.
/// `%p`, `%h`, `%r`, `%d` and `%f` have 16, 40, 40, 40 and 40 registers of 0, 16, 32, 64 and 32
/// bits. `%d0` is `p0`, `%d1` is `p1`, `%r0` the thread, `%d2` is `p0` + 8·thread.
pub fn text(threads: usize, body: &str) -> String {
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n\
         .extern .shared .align 16 .b8 global_smem[];\n\
         .visible .entry k(\n.param .u64 .ptr .global .align 1 p0,\n\
         .param .u64 .ptr .global .align 1 p1,\n.param .u32 n\n)\n.reqntid {threads}\n{{\n\
         .reg .pred %p<16>;\n.reg .b16 %h<40>;\n.reg .b32 %r<40>;\n.reg .b64 %d<40>;\n\
         .reg .b32 %f<40>;\nld.param.b64 %d0, [p0];\nld.param.b64 %d1, [p1];\n\
         mov.u32 %r0, %tid.x;\nmad.wide.u32 %d2, %r0, 8, %d0;\n{body}\nret;\n}}\n"
    )
}

/// A run of [`text`].
pub struct Run {
    pub memory: Memory,
    pub p0: u64,
    pub p1: u64,
    pub result: Result<Profile, SimError>,
}

impl Run {
    pub fn words(&self, count: usize) -> Vec<u32> {
        let bytes = self.memory.read(self.p0, 4 * count).expect("written");
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    /// The fault's kind and its message.
    pub fn fault(&self) -> (FaultKind, String) {
        let error = self.result.as_ref().expect_err("a fault is expected");
        let kind = error.fault().unwrap_or_else(|| panic!("not a fault: {error}"));
        (kind.clone(), error.to_string())
    }
}

pub struct Setup {
    pub threads: usize,
    pub grid: u32,
    pub shared: usize,
    pub n: i32,
    pub options: Options,
}

impl Default for Setup {
    fn default() -> Self {
        Setup { threads: 32, grid: 1, shared: 4096, n: 0, options: Options::default() }
    }
}

/// Runs a body: `p0` is 1 KiB of nothing, `p1` 1 KiB of bytes 0, 1, 2, …
pub fn run(setup: &Setup, body: &str) -> Run {
    let module = Module::parse(&text(setup.threads, body)).unwrap_or_else(|e| panic!("{e}"));
    let mut memory = Memory::new();
    let p0 = memory.alloc_uninit("out", 1024);
    let p1 = memory.alloc("input", &(0..1024).map(|i| i as u8).collect::<Vec<_>>());
    let launched = Launch {
        entry: "k",
        grid: [setup.grid, 1, 1],
        block: [setup.threads as u32, 1, 1],
        dynamic_shared: setup.shared,
        args: &[Arg::Pointer(p0), Arg::Pointer(p1), Arg::I32(setup.n)],
    };
    let result = launch(&module, &launched, &mut memory, &setup.options);
    Run { memory, p0, p1, result }
}

/// Assembles a body over 32 lanes whose sources differ by lane.
pub struct Asm {
    body: String,
    input: Vec<u64>,
    next: usize,
}

impl Asm {
    pub fn new() -> Self {
        Asm { body: String::new(), input: Vec::new(), next: 3 }
    }

    pub fn line(&mut self, line: &str) {
        self.body += line;
        self.body.push('\n');
    }

    /// A fresh register.
    pub fn register(&mut self, bits: u32) -> String {
        self.next += 1;
        let prefix = match bits {
            16 => "%h",
            32 => "%r",
            _ => "%d",
        };
        format!("{prefix}{}", self.next)
    }

    /// A register that holds `values[lane]`, and 1 past their end.
    pub fn load(&mut self, values: &[u64], bits: u32) -> String {
        let offset = self.input.len() * 8;
        self.input.extend(values);
        self.input.resize(offset / 8 + LANES, 1);
        let register = self.register(bits);
        self.line(&format!("ld.global.b{bits} {register}, [%d2+{offset}];"));
        register
    }

    /// Runs and returns a register of all lanes.
    pub fn run(&self, result: &str, bits: u32) -> Vec<u64> {
        let body = format!(
            "{}mad.wide.u32 %d3, %r0, 8, %d1;\nst.global.b{bits} [%d3], {result};",
            self.body
        );
        let module = Module::parse(&text(LANES, &body)).unwrap_or_else(|e| panic!("{e}"));
        let mut memory = Memory::new();
        let bytes: Vec<u8> = self.input.iter().flat_map(|value| value.to_le_bytes()).collect();
        let (input, out) = (memory.alloc("input", &bytes), memory.alloc("out", &[0; 256]));
        let args = [Arg::Pointer(input), Arg::Pointer(out), Arg::I32(0)];
        let launched =
            Launch { entry: "k", grid: [1; 3], block: [32, 1, 1], dynamic_shared: 0, args: &args };
        launch(&module, &launched, &mut memory, &Options::default())
            .unwrap_or_else(|e| panic!("{e}"));
        let bytes = memory.read(out, 256).expect("inside");
        bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
    }
}
