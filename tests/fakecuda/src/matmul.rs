//! What cuBLASLt computes: `D = α·op(A)·op(B) + β·C + bias` over column-major matrices, in f32,
//! each sum in ascending order of k. The real library's order is its own.

use half::{bf16, f16};
use quire_ptxsim::{Memory, SimError};

use crate::code::{self, Result};
use crate::driver::Driver;

/// Result of reading or writing device memory.
type Access<T = ()> = std::result::Result<T, SimError>;

/// Type of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F32,
    F16,
    Bf16,
}

impl Element {
    /// By the number of `cudaDataType_t`.
    pub fn from_number(number: u32) -> Option<Element> {
        match number {
            0 => Some(Element::F32),
            2 => Some(Element::F16),
            14 => Some(Element::Bf16),
            _ => None,
        }
    }

    fn bytes(self) -> usize {
        if self == Element::F32 { 4 } else { 2 }
    }

    fn decode(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Element::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Element::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (Element::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            _ => unreachable!("{self:?} of {} bytes", bytes.len()),
        }
    }

    fn encode(self, value: f32, into: &mut Vec<u8>) {
        match self {
            Element::F32 => into.extend(value.to_le_bytes()),
            Element::F16 => into.extend(f16::from_f32(value).to_le_bytes()),
            Element::Bf16 => into.extend(bf16::from_f32(value).to_le_bytes()),
        }
    }
}

/// How a column-major matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub element: Element,
    pub rows: usize,
    pub cols: usize,
    /// Elements from one column to the next.
    pub stride: usize,
}

impl Layout {
    /// Bytes from the first element to the end of the last one; `None` where that is no number.
    fn bytes(&self) -> Option<usize> {
        let last = self.cols.checked_sub(1)?.checked_mul(self.stride)?;
        last.checked_add(self.rows)?.checked_mul(self.element.bytes())
    }
}

/// A matrix in device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub address: u64,
    pub layout: Layout,
}

impl Matrix {
    fn column(&self, column: usize) -> u64 {
        self.address + (column * self.layout.stride * self.layout.element.bytes()) as u64
    }

    /// The elements of a column, all of which something must have written.
    fn read(&self, memory: &Memory, column: usize) -> Access<Vec<f32>> {
        let Layout { element, rows, .. } = self.layout;
        let bytes = memory.read(self.column(column), rows * element.bytes())?;
        Ok(bytes.chunks_exact(element.bytes()).map(|bytes| element.decode(bytes)).collect())
    }

    /// Rows of the matrix, or of its transpose: `[rows][columns]`.
    fn rows(&self, memory: &Memory, transposed: bool) -> Access<Vec<Vec<f32>>> {
        let columns: Vec<Vec<f32>> =
            (0..self.layout.cols).map(|column| self.read(memory, column)).collect::<Access<_>>()?;
        if transposed {
            return Ok(columns);
        }
        let row = |i: usize| columns.iter().map(|column| column[i]).collect();
        Ok((0..self.layout.rows).map(row).collect())
    }
}

/// Which product.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Operation {
    pub transposed_a: bool,
    pub transposed_b: bool,
    /// Whether `bias` is added.
    pub has_bias: bool,
    /// Address of one element of D's type for each row.
    pub bias: u64,
}

/// A product that is ready to run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matmul {
    pub operation: Operation,
    pub alpha: f32,
    pub beta: f32,
    pub a: Matrix,
    pub b: Matrix,
    pub c: Matrix,
    pub d: Matrix,
}

/// Whether the matrices fit together, and there is such a product.
pub(crate) fn check_layouts(operation: &Operation, [a, b, c, d]: [Layout; 4]) -> bool {
    let op = |layout: Layout, transposed: bool| match transposed {
        true => (layout.cols, layout.rows),
        false => (layout.rows, layout.cols),
    };
    let (m, k) = op(a, operation.transposed_a);
    let (inner, n) = op(b, operation.transposed_b);
    let whole = |layout: Layout| layout.stride >= layout.rows && layout.bytes().is_some();
    inner == k
        && (d.rows, d.cols) == (m, n)
        && c == d
        && a.element == b.element
        && [a, b, c, d].into_iter().all(whole)
        && [m, n, k].iter().all(|&extent| extent > 0)
}

impl Matmul {
    pub fn flops(&self) -> u64 {
        let Layout { rows, cols, .. } = self.a.layout;
        2 * (rows * cols * self.d.layout.cols) as u64
    }

    /// Bytes that are read of A and B.
    pub fn read_bytes(&self) -> u64 {
        let bytes = |matrix: Matrix| matrix.layout.bytes().unwrap_or(0) as u64;
        bytes(self.a) + bytes(self.b)
    }

    /// Bytes that are written.
    pub fn written_bytes(&self) -> u64 {
        self.d.layout.bytes().unwrap_or(0) as u64
    }

    pub fn run(&self, memory: &mut Memory) -> Access {
        let Operation { transposed_a, transposed_b, has_bias, bias } = self.operation;
        let a = self.a.rows(memory, transposed_a)?;
        let b = self.b.rows(memory, !transposed_b)?;
        let Layout { element, rows, cols, .. } = self.d.layout;
        let bias = match has_bias {
            true => {
                let layout = Layout { element, rows, cols: 1, stride: rows };
                Matrix { address: bias, layout }.read(memory, 0)?
            }
            false => vec![0.0; rows],
        };
        for (column, b) in b.iter().enumerate().take(cols) {
            let before = match self.beta {
                0.0 => vec![0.0; rows],
                _ => self.c.read(memory, column)?,
            };
            let mut bytes = Vec::with_capacity(rows * element.bytes());
            for row in 0..rows {
                let sum = a[row].iter().zip(b).fold(0f32, |sum, (x, y)| x.mul_add(*y, sum));
                let value = self.alpha * sum + self.beta * before[row] + bias[row];
                element.encode(value, &mut bytes);
            }
            memory.write(self.d.column(column), &bytes)?;
        }
        Ok(())
    }
}

impl Driver {
    /// All that a product touches must be in allocations.
    pub fn check_matmul(&self, matmul: &Matmul) -> Result {
        for matrix in [matmul.a, matmul.b, matmul.c, matmul.d] {
            let bytes = matrix.layout.bytes().ok_or(code::INVALID_VALUE)?;
            self.check_range(matrix.address, bytes)?;
        }
        let Layout { element, rows, .. } = matmul.d.layout;
        match matmul.operation {
            Operation { has_bias: true, bias, .. } => {
                self.check_range(bias, rows * element.bytes())
            }
            _ => Ok(()),
        }
    }
}
