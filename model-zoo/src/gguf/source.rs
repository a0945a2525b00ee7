//! A GGUF file's weights under Hugging Face names and in Hugging Face row order.
//!
//! llama.cpp rotates pairs `(2i, 2i + 1)` for the llama architecture, so its converter reorders the
//! query and key rows of each head: `(i, i + head_dim / 2)` become neighbours. Reading undoes that;
//! other architectures keep their order.

use std::{collections::BTreeMap, ops::Range};

use super::{GgufFile, TensorInfo, names, spec::is_permuted};
use crate::{
    error::LoadError,
    source::{SourceDtype, WeightSource},
    spec::DecoderSpec,
};

/// The weights of one GGUF file.
pub struct GgufSource {
    file: GgufFile,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Clone, Copy)]
struct Entry {
    /// Index into the file's tensors.
    index: usize,
    order: RowOrder,
}

/// How a tensor's rows (a vector's elements) are stored.
#[derive(Clone, Copy)]
enum RowOrder {
    Plain,
    /// The two halves of each head of this many rows are interleaved.
    Interleaved {
        head_dim: usize,
    },
}

impl RowOrder {
    /// Where row `row` of the model is stored.
    fn stored(self, row: usize) -> usize {
        match self {
            Self::Plain => row,
            Self::Interleaved { head_dim } => {
                let (head, i) = (row / head_dim, row % head_dim);
                let half = head_dim / 2;
                head * head_dim + 2 * (i % half) + i / half
            }
        }
    }
}

impl GgufSource {
    /// Takes a file whose [`GgufFile::spec`] is `spec`.
    pub(super) fn new(file: GgufFile, spec: &DecoderSpec) -> Result<Self, LoadError> {
        let is_permuted = is_permuted(file.metadata())?;
        let mut tensors = BTreeMap::new();
        for (index, tensor) in file.header.tensors.iter().enumerate() {
            if names::ROPE_FACTORS.contains(&tensor.name.as_str()) {
                continue;
            }
            let Some(name) = names::hugging_face_name(&tensor.name) else {
                let problem = format!("is not part of {}", spec.architecture);
                return Err(file.tensor_error(&tensor.name, problem));
            };
            let order = if is_permuted && names::is_query_or_key(&tensor.name) {
                let head_dim = spec.head_dim;
                if !tensor.shape[0].is_multiple_of(head_dim) {
                    let problem = format!("has {} rows; heads have {head_dim}", tensor.shape[0]);
                    return Err(file.tensor_error(&tensor.name, problem));
                }
                RowOrder::Interleaved { head_dim }
            } else {
                RowOrder::Plain
            };
            tensors.insert(name, Entry { index, order });
        }
        Ok(Self { file, tensors })
    }

    /// The file the weights come from.
    pub fn file(&self) -> &GgufFile {
        &self.file
    }

    fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|entry| &self.file.header.tensors[entry.index])
    }
}

impl WeightSource for GgufSource {
    fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensor(name).map(|tensor| &tensor.shape[..])
    }

    fn dtype(&self, name: &str) -> Option<SourceDtype> {
        self.tensor(name).map(|tensor| tensor.dtype)
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn read_row(&self, name: &str, row: usize, out: &mut [f32]) -> Result<(), LoadError> {
        let Some(&Entry { index, order }) = self.tensors.get(name) else {
            return Err(self.file.tensor_error(name, "does not exist"));
        };
        let tensor = &self.file.header.tensors[index];
        match tensor.shape[..] {
            [rows, _] if row < rows => self.file.read_row(tensor, order.stored(row), out),
            [_] if matches!(order, RowOrder::Interleaved { .. }) => {
                let mut stored = vec![0.0; out.len()];
                self.file.read_row(tensor, row, &mut stored)?;
                for (i, out) in out.iter_mut().enumerate() {
                    *out = stored[order.stored(i)];
                }
                Ok(())
            }
            _ => self.file.read_row(tensor, row, out),
        }
    }

    fn stored_row(&self, name: &str, row: usize) -> Option<&[u8]> {
        let &Entry { index, order } = self.tensors.get(name)?;
        let tensor = &self.file.header.tensors[index];
        let [rows, _] = tensor.shape[..] else { return None };
        (row < rows).then(|| self.file.stored_row(tensor, order.stored(row)))
    }

    fn release(&self, name: &str, rows: Range<usize>) {
        if let Some(tensor) = self.tensor(name) {
            // Rows in another order stay within their head, or are read again.
            self.file.release(tensor, rows);
        }
    }

    fn location(&self, _name: &str) -> String {
        self.file.path().display().to_string()
    }
}
