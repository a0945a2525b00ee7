//! A kernel after decoding: typed instructions over numbered registers.
//!
//! Values of 16, 32 and 64 bits share one register file, predicates have their own. Literals are
//! constants of the kernel: an operand is an index either way, and nothing is parsed at run time.

use std::fmt;

use crate::alu::compare::Compare;
use crate::alu::{Alu, Lanes};

/// The kernels of one PTX file.
#[derive(Debug)]
pub struct Module {
    pub(crate) kernels: Vec<Kernel>,
}

impl Module {
    /// Parses and decodes a file of PTX 8.0 for sm_80, as Triton prints it.
    ///
    /// # Errors
    /// Whatever the interpreter does not know is refused, with its line.
    pub fn parse(ptx: &str) -> Result<Self, crate::ParseError> {
        crate::parse::module(ptx)
    }

    /// Names of the entries.
    pub fn entries(&self) -> impl Iterator<Item = &str> {
        self.kernels.iter().map(|kernel| kernel.name.as_str())
    }

    /// The entry of that name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }
}

/// One `.entry`.
#[derive(Debug)]
pub struct Kernel {
    pub(crate) name: String,
    pub(crate) params: Vec<Param>,
    pub(crate) threads: u32,
    pub(crate) num_regs: usize,
    pub(crate) num_preds: usize,
    pub(crate) constants: Vec<Lanes>,
    pub(crate) code: Vec<Instr>,
    /// Full opcodes, modifiers included; an instruction holds an index.
    pub(crate) opcodes: Vec<String>,
}

impl Kernel {
    /// The parameters in order.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// Threads of a block, from `.reqntid`.
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// Number of instructions in the file.
    pub fn len(&self) -> usize {
        self.code.len()
    }

    /// True of a kernel without instructions.
    pub fn is_empty(&self) -> bool {
        self.code.is_empty()
    }
}

/// A kernel parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// Its name in the file.
    pub name: String,
    /// Its type.
    pub ty: ParamType,
    /// Byte offset in the parameter block.
    pub offset: usize,
}

/// Type of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamType {
    /// 32 bits.
    U32,
    /// A float.
    F32,
    /// 64 bits that are not a pointer.
    U64,
    /// An address in global memory, or null.
    Pointer,
}

impl ParamType {
    /// Size and alignment.
    pub fn bytes(self) -> usize {
        match self {
            ParamType::U32 | ParamType::F32 => 4,
            ParamType::U64 | ParamType::Pointer => 8,
        }
    }
}

impl fmt::Display for ParamType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ParamType::U32 => "32-bit integer",
            ParamType::F32 => "f32",
            ParamType::U64 => "64-bit integer",
            ParamType::Pointer => "pointer",
        })
    }
}

/// A value register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reg(pub u32);

/// A predicate register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pred(pub u32);

/// Something to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Src {
    Reg(Reg),
    /// Index into the kernel's constants.
    Const(u32),
}

/// `@p` or `@!p`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    pub pred: Pred,
    pub negated: bool,
}

/// Base plus constant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub base: Src,
    pub offset: i64,
}

/// Registers that the hardware sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Special {
    Tid,
    LaneId,
    Ntid,
    Ctaid(usize),
    Nctaid(usize),
}

/// How a loaded or stored element looks in memory and in a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Element {
    /// 1, 2, 4 or 8.
    pub bytes: usize,
    /// A load extends the sign to the register's width.
    pub signed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PredOp {
    And,
    Or,
    Xor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PredSrc {
    Reg(Pred),
    /// The same for all lanes.
    Const(bool),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShuffleMode {
    Butterfly,
    Index,
    Up,
    Down,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VoteMode {
    All,
    Any,
}

/// Element types of the tensor-core multiplicands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MmaType {
    F16,
    Bf16,
}

/// What an instruction does.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// Lane-wise, by the table in [`crate::alu`].
    Alu {
        alu: Alu,
        dst: Reg,
        srcs: [Src; 3],
    },
    Lop3 {
        dst: Reg,
        srcs: [Src; 3],
        table: u8,
    },
    Move {
        dst: Reg,
        src: Src,
    },
    MoveSpecial {
        dst: Reg,
        special: Special,
    },
    /// `mov` of several registers into a wider one, the first one lowest.
    Pack {
        dst: Reg,
        parts: Vec<Src>,
        bits: u32,
    },
    /// `mov` of a register into several narrower ones.
    Unpack {
        src: Src,
        parts: Vec<Option<Reg>>,
        bits: u32,
    },
    Select {
        dst: Reg,
        yes: Src,
        no: Src,
        pred: Pred,
    },
    /// `setp`, combined with a predicate where there is one.
    SetPred {
        dst: Pred,
        compare: Compare,
        a: Src,
        b: Src,
        with: Option<(PredOp, PredSrc)>,
    },
    MovePred {
        dst: Pred,
        src: PredSrc,
    },
    NotPred {
        dst: Pred,
        src: Pred,
    },
    CombinePred {
        dst: Pred,
        op: PredOp,
        a: PredSrc,
        b: PredSrc,
    },
    /// Bits of the parameter block; the launch has filled it.
    LoadParam {
        dst: Reg,
        offset: usize,
        element: Element,
        dst_bits: u32,
    },
    LoadGlobal(Load),
    LoadShared(Load),
    StoreGlobal(Store),
    StoreShared(Store),
    /// Copies `size` bytes, of which those past `from_bytes` are zeros.
    CopyAsync {
        to: Address,
        from: Address,
        size: usize,
        from_bytes: Option<Src>,
    },
    CommitGroup,
    /// Lands all committed groups but the latest `keep`.
    WaitGroup {
        keep: usize,
    },
    LoadMatrix {
        dsts: Vec<Reg>,
        address: Address,
        transposed: bool,
    },
    Mma {
        ty: MmaType,
        d: [Reg; 4],
        a: [Src; 4],
        b: [Src; 2],
        c: [Src; 4],
    },
    Shuffle {
        mode: ShuffleMode,
        dst: Reg,
        value: Src,
        lane: Src,
        clamp: Src,
        members: u32,
    },
    Vote {
        mode: VoteMode,
        dst: Pred,
        src: Pred,
        negated: bool,
        members: u32,
    },
    Ballot {
        dst: Reg,
        src: Pred,
        negated: bool,
        members: u32,
    },
    Reduce {
        f: fn(u32, u32) -> u32,
        dst: Reg,
        src: Src,
        members: Src,
    },
    Barrier,
    WarpBarrier {
        members: u32,
    },
    Branch {
        target: usize,
        uniform: bool,
    },
    Return,
}

/// `ld`.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    /// One for each element, up to four; `None` is `_`.
    pub dsts: Vec<Option<Reg>>,
    /// Width of the destination registers, to which a sign is extended.
    pub dst_bits: u32,
    pub element: Element,
    pub address: Address,
}

/// `st`.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    /// One for each element, up to four.
    pub srcs: Vec<Src>,
    pub element: Element,
    pub address: Address,
}

/// An instruction and where it stands.
#[derive(Clone, Debug)]
pub(crate) struct Instr {
    pub guard: Option<Guard>,
    pub op: Op,
    /// Index into [`Kernel::opcodes`].
    pub opcode: usize,
    /// Line of the file, from 1.
    pub line: usize,
    /// As written, white space collapsed.
    pub text: String,
}
