//! One warp: which lanes are where, branches, and the dispatch of everything else.
//!
//! Lanes at the same instruction run together. Where they diverge, those with the smallest program
//! counter go first, so that they meet the others at the end of a forward branch.

use super::registers::Registers;
use super::{LaneFault, Machine, collective, lanewise, memory};
use crate::alu::LANES;
use crate::error::{Fault, FaultKind};
use crate::memory::Toucher;
use crate::program::{Guard, Kernel, Op};

/// Why a warp does not run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// It waits at the barrier with that index.
    Barrier(usize),
    /// All lanes have returned.
    Exited,
}

pub(super) struct Warp {
    index: usize,
    pub registers: Registers,
    pub copies: memory::Copies,
    /// Lanes that run, and their instruction.
    active: u32,
    pc: usize,
    /// Lanes that are elsewhere.
    elsewhere: Vec<(usize, u32)>,
}

/// A warp's view of the block it is in.
pub(super) struct Context<'m, 'a> {
    pub machine: &'m mut Machine<'a>,
    pub warp: usize,
    /// Number of the block in the grid.
    pub block: u32,
}

impl Context<'_, '_> {
    /// Who touches memory now.
    pub fn toucher(&self) -> Toucher {
        let interval = self.machine.shared.interval();
        Toucher { block: self.block, interval, warp: self.warp }
    }
}

impl Warp {
    pub fn new(kernel: &Kernel, index: usize) -> Self {
        Warp {
            index,
            registers: Registers::new(kernel),
            copies: memory::Copies::default(),
            active: !0,
            pc: 0,
            elsewhere: Vec::new(),
        }
    }

    /// Back to the first instruction, with nothing defined.
    pub fn reset(&mut self) {
        self.registers.reset();
        self.copies = memory::Copies::default();
        (self.active, self.pc) = (!0, 0);
        self.elsewhere.clear();
    }

    /// The barrier at which the warp waits is complete.
    pub fn pass_barrier(&mut self) {
        self.pc += 1;
    }

    /// Runs until a barrier or the end.
    pub fn run(&mut self, machine: &mut Machine<'_>, block: u32) -> Result<Stop, Box<Fault>> {
        let kernel = machine.kernel;
        let warp = self.index;
        let mut context = Context { machine, warp, block };
        while self.reconverge() {
            context.machine.issued[self.pc] += 1;
            context.machine.total += 1;
            match self.step(kernel, &mut context) {
                Ok(None) => {}
                Ok(Some(stop)) => return Ok(stop),
                Err(LaneFault { lane, kind }) => {
                    return Err(self.fault(context.machine, block, lane, kind));
                }
            }
        }
        Ok(Stop::Exited)
    }

    /// A fault of the instruction that the warp is at.
    pub fn fault(
        &self,
        machine: &Machine<'_>,
        block: u32,
        lane: Option<usize>,
        kind: FaultKind,
    ) -> Box<Fault> {
        let instr = &machine.kernel.code[self.pc];
        Box::new(Fault {
            kernel: machine.kernel.name.clone(),
            line: instr.line,
            text: instr.text.clone(),
            cta: coordinates(block, machine.grid),
            warp: self.index,
            lane,
            kind,
        })
    }

    /// Makes the lanes with the smallest program counter active; false when none are left.
    fn reconverge(&mut self) -> bool {
        if self.elsewhere.is_empty() {
            return self.active != 0;
        }
        if self.active != 0 {
            self.elsewhere.push((self.pc, self.active));
        }
        self.pc = self.elsewhere.iter().map(|&(pc, _)| pc).min().unwrap_or(0);
        self.active = 0;
        let (pc, active) = (self.pc, &mut self.active);
        self.elsewhere.retain(|&(other, lanes)| {
            if other == pc {
                *active |= lanes;
            }
            other != pc
        });
        true
    }

    /// Lanes that have not returned.
    fn live(&self) -> u32 {
        self.elsewhere.iter().fold(self.active, |live, (_, lanes)| live | lanes)
    }

    /// Executes one instruction and moves on, but for a barrier.
    fn step(
        &mut self,
        kernel: &Kernel,
        context: &mut Context<'_, '_>,
    ) -> Result<Option<Stop>, LaneFault> {
        if context.machine.total > context.machine.limit {
            let limit = context.machine.limit;
            return Err(LaneFault::warp(FaultKind::Runaway { limit }));
        }
        let instr = &kernel.code[self.pc];
        let mask = match instr.guard {
            None => self.active,
            Some(Guard { pred, negated }) => {
                self.registers.decided(pred, negated, self.active, "guard")?
            }
        };
        match instr.op {
            Op::Branch { target, uniform } => {
                let lanes = self.active;
                if uniform && mask != 0 && mask != lanes {
                    let kind = FaultKind::DivergentUniformBranch { taken: mask, lanes };
                    return Err(LaneFault::warp(kind));
                }
                self.branch(mask, target);
                return Ok(None);
            }
            Op::Return => {
                self.active &= !mask;
            }
            Op::Barrier => {
                self.check_barrier(mask)?;
                return Ok(Some(Stop::Barrier(self.pc)));
            }
            _ if mask != 0 => self.execute(&instr.op, mask, context)?,
            _ => {}
        }
        self.pc += 1;
        Ok(None)
    }

    fn branch(&mut self, taken: u32, target: usize) {
        let stay = self.active & !taken;
        if taken == 0 {
            self.pc += 1;
        } else if stay == 0 {
            self.pc = target;
        } else {
            self.elsewhere.push((target, taken));
            self.active = stay;
            self.pc += 1;
        }
    }

    fn check_barrier(&self, mask: u32) -> Result<(), LaneFault> {
        if mask == !0 {
            return Ok(());
        }
        let exited = !self.live();
        let reason = format!("only lanes {mask:#010x} are here; {exited:#010x} have exited");
        Err(LaneFault::warp(FaultKind::DivergentBarrier { reason }))
    }

    fn execute(
        &mut self,
        op: &Op,
        mask: u32,
        context: &mut Context<'_, '_>,
    ) -> Result<(), LaneFault> {
        let registers = &mut self.registers;
        match op {
            Op::LoadGlobal(load) => memory::load_global(registers, load, mask, context),
            Op::LoadShared(load) => memory::load_shared(registers, load, mask, context),
            Op::StoreGlobal(store) => memory::store_global(registers, store, mask, context),
            Op::StoreShared(store) => memory::store_shared(registers, store, mask, context),
            Op::LoadMatrix { .. } => memory::load_matrix(registers, op, mask, context),
            Op::CopyAsync { .. } => self.copies.issue(registers, op, mask, context),
            Op::CommitGroup => self.copies.commit(mask),
            Op::WaitGroup { keep } => self.copies.wait(*keep, mask, context),
            Op::Mma { .. } => collective::mma(registers, op, mask, context),
            Op::Shuffle { .. } => collective::shuffle(registers, op, mask, context),
            Op::Vote { .. } | Op::Ballot { .. } => collective::vote(registers, op, mask),
            Op::Reduce { .. } => collective::reduce(registers, op, mask, context),
            Op::WarpBarrier { members } => collective::check_members(*members, mask),
            _ => {
                lanewise::execute(registers, op, mask, context);
                Ok(())
            }
        }
    }
}

/// `%ctaid` of a block number; x runs fastest.
pub(super) fn coordinates(block: u32, grid: [u32; 3]) -> [u32; 3] {
    let [x, y, _] = grid;
    [block % x, block / x % y, block / x / y]
}

/// The thread index of each lane.
pub(super) fn thread_ids(warp: usize) -> [u64; LANES] {
    std::array::from_fn(|lane| (warp * LANES + lane) as u64)
}
