//! The registers of one warp, and which lanes of each are defined.

use super::LaneFault;
use crate::alu::{LANES, Lanes};
use crate::error::FaultKind;
use crate::program::{Kernel, Pred, PredSrc, Reg, Src};

/// A predicate of all lanes; a lane whose bit of `undefined` is set holds nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct PredValue {
    pub value: u32,
    pub undefined: u32,
}

pub(super) struct Registers {
    values: Vec<Lanes>,
    /// Lanes of each register that nothing has defined.
    undefined: Vec<u32>,
    preds: Vec<PredValue>,
}

impl Registers {
    pub fn new(kernel: &Kernel) -> Self {
        Registers {
            values: vec![[0; LANES]; kernel.num_regs],
            undefined: vec![!0; kernel.num_regs],
            preds: vec![PredValue { value: 0, undefined: !0 }; kernel.num_preds],
        }
    }

    /// Nothing is defined.
    pub fn reset(&mut self) {
        self.undefined.fill(!0);
        self.preds.fill(PredValue { value: 0, undefined: !0 });
    }

    pub fn value<'a>(&'a self, kernel: &'a Kernel, src: Src) -> &'a Lanes {
        match src {
            Src::Reg(reg) => &self.values[reg.0 as usize],
            Src::Const(index) => &kernel.constants[index as usize],
        }
    }

    /// Lanes of the source that are undefined.
    pub fn undefined(&self, src: Src) -> u32 {
        match src {
            Src::Reg(reg) => self.undefined[reg.0 as usize],
            Src::Const(_) => 0,
        }
    }

    /// The value, which has to be defined in `mask`; `what` says what it is for.
    pub fn defined(
        &self,
        kernel: &Kernel,
        src: Src,
        mask: u32,
        what: &'static str,
    ) -> Result<Lanes, LaneFault> {
        require(self.undefined(src) & mask, what)?;
        Ok(*self.value(kernel, src))
    }

    /// Writes the lanes of `mask`.
    pub fn write(&mut self, dst: Reg, mask: u32, values: &Lanes, undefined: u32) {
        let register = &mut self.values[dst.0 as usize];
        if mask == !0 {
            *register = *values;
        } else {
            super::lanes(mask).for_each(|lane| register[lane] = values[lane]);
        }
        let old = &mut self.undefined[dst.0 as usize];
        *old = *old & !mask | undefined & mask;
    }

    /// Writes one lane.
    pub fn write_lane(&mut self, dst: Reg, lane: usize, value: u64, defined: bool) {
        self.values[dst.0 as usize][lane] = value;
        let undefined = &mut self.undefined[dst.0 as usize];
        *undefined = *undefined & !(1 << lane) | u32::from(!defined) << lane;
    }

    pub fn pred(&self, pred: Pred) -> PredValue {
        self.preds[pred.0 as usize]
    }

    pub fn pred_src(&self, src: PredSrc) -> PredValue {
        match src {
            PredSrc::Reg(pred) => self.pred(pred),
            PredSrc::Const(value) => PredValue { value: if value { !0 } else { 0 }, undefined: 0 },
        }
    }

    /// The predicate, negated or not, which has to be defined in `mask`.
    pub fn decided(
        &self,
        pred: Pred,
        negated: bool,
        mask: u32,
        what: &'static str,
    ) -> Result<u32, LaneFault> {
        let PredValue { value, undefined } = self.pred(pred);
        require(undefined & mask, what)?;
        Ok(if negated { !value & mask } else { value & mask })
    }

    pub fn write_pred(&mut self, dst: Pred, mask: u32, new: PredValue) {
        let old = &mut self.preds[dst.0 as usize];
        old.value = old.value & !mask | new.value & mask;
        old.undefined = old.undefined & !mask | new.undefined & mask;
    }
}

/// An error where a lane is undefined.
fn require(undefined: u32, what: &'static str) -> Result<(), LaneFault> {
    match super::lanes(undefined).next() {
        None => Ok(()),
        Some(lane) => Err(LaneFault::at(lane)(FaultKind::Uninitialised { what })),
    }
}
