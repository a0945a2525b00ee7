//! What every kernel call needs: the instruction set and the workers.

use crate::isa::Isa;
use crate::pool::Pool;

/// Instruction set and worker pool, passed to every kernel.
pub struct Ctx {
    /// The path the kernels take.
    pub isa: Isa,
    /// The workers.
    pub pool: Pool,
}

/// Why a [`Ctx`] cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum CtxError {
    /// The instruction set is not there.
    #[error("this machine does not run the {isa} kernels; it runs {}", names(available))]
    IsaUnavailable {
        /// The path asked for.
        isa: Isa,
        /// The paths there are.
        available: Vec<Isa>,
    },
    /// No threads were asked for.
    #[error("the number of threads must be at least 1")]
    NoThreads,
    /// The system refused a thread.
    #[error("cannot start {threads} worker threads")]
    Spawn {
        /// The number asked for.
        threads: usize,
        /// The system's reason.
        source: std::io::Error,
    },
}

fn names(isas: &[Isa]) -> String {
    isas.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ")
}

impl Ctx {
    /// A context of `threads` workers on the path `isa`.
    pub fn new(isa: Isa, threads: usize) -> Result<Self, CtxError> {
        if !isa.is_available() {
            return Err(CtxError::IsaUnavailable { isa, available: Isa::available() });
        }
        if threads == 0 {
            return Err(CtxError::NoThreads);
        }
        let pool = Pool::new(threads).map_err(|source| CtxError::Spawn { threads, source })?;
        Ok(Self { isa, pool })
    }

    /// Calls `f(start, end)` over ranges of `rows`, on several workers if the rows are worth it.
    ///
    /// `row_len` is the work of a row in elements.
    pub(crate) fn for_rows(&self, rows: usize, row_len: usize, f: impl Fn(usize, usize) + Sync) {
        // A wake-up costs a few microseconds, in which one core handles some thousand elements.
        const MIN_ELEMENTS: usize = 8192;
        let chunk = (MIN_ELEMENTS / row_len.max(1)).max(1);
        self.pool.for_each(rows.div_ceil(chunk), |_, item| {
            f(item * chunk, rows.min((item + 1) * chunk));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_contexts_are_errors() {
        assert!(matches!(Ctx::new(Isa::Portable, 0), Err(CtxError::NoThreads)));
        let missing = [Isa::Neon, Isa::Avx2].into_iter().find(|isa| !isa.is_available()).unwrap();
        let error = Ctx::new(missing, 1).err().unwrap().to_string();
        assert!(error.contains(missing.name()) && error.contains("portable"), "{error}");
    }
}
