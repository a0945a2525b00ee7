//! The header: metadata and tensor infos, checked against each other and against the file.

use std::{collections::HashSet, ops::Range, path::Path};

use super::{metadata::Metadata, reader::Reader, types::tensor_type};
use crate::{
    error::{LoadError, check_limit},
    source::SourceDtype,
};

const DEFAULT_ALIGNMENT: usize = 32;
const MAX_ALIGNMENT: usize = 1 << 20;
const MAX_TENSORS: u64 = 1 << 17;
const MAX_KEYS: u64 = 1 << 16;
/// ggml's own limit.
const MAX_DIMENSIONS: u32 = 4;
/// A name length, one dimension count, one dimension, a type, an offset.
const MIN_TENSOR_INFO_BYTES: usize = 8 + 4 + 8 + 4 + 8;
/// A name length, a type, a value of one byte.
const MIN_KEY_BYTES: usize = 8 + 4 + 1;

#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: Metadata,
    /// In file order, names unique.
    pub(super) tensors: Vec<TensorInfo>,
}

/// One tensor, its data checked to lie within the file.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub(super) name: String,
    pub(super) dtype: SourceDtype,
    /// Slowest dimension first, `[rows, cols]`: the reverse of the file's order. No dimension is 0.
    pub(super) shape: Vec<usize>,
    /// Bytes within the file.
    pub(super) data: Range<usize>,
}

pub(super) fn parse(path: &Path, file: &[u8]) -> Result<Header, LoadError> {
    let mut reader = Reader::new(path, file);
    if reader.array("the magic")? != *b"GGUF" {
        return Err(LoadError::malformed(path, "does not start with GGUF"));
    }
    check_version(&mut reader)?;
    let num_tensors = reader.count(MIN_TENSOR_INFO_BYTES, "the number of tensors")?;
    check_limit(path, "number of tensors", num_tensors as u64, MAX_TENSORS)?;
    let num_keys = reader.count(MIN_KEY_BYTES, "the number of keys")?;
    check_limit(path, "number of keys", num_keys as u64, MAX_KEYS)?;

    let metadata = Metadata::parse(&mut reader, num_keys)?;
    check_split(&metadata)?;
    let alignment = read_alignment(&metadata)?;
    let mut tensors = Vec::with_capacity(num_tensors);
    for _ in 0..num_tensors {
        tensors.push(read_tensor_info(&mut reader, alignment)?);
    }
    check_names(path, &tensors)?;
    place_data(path, &mut tensors, reader.position().next_multiple_of(alignment), file.len())?;
    Ok(Header { metadata, tensors })
}

fn check_version(reader: &mut Reader<'_>) -> Result<(), LoadError> {
    let version = reader.u32("the version")?;
    match version {
        2 | 3 => Ok(()),
        _ if matches!(version.swap_bytes(), 1..=3) => {
            Err(LoadError::unsupported(reader.path(), "byte order", "big-endian"))
        }
        _ => Err(LoadError::unsupported(reader.path(), "GGUF version", &version.to_string())),
    }
}

fn check_split(metadata: &Metadata) -> Result<(), LoadError> {
    match metadata.count("split.count", 0..=usize::from(u16::MAX))? {
        None | Some(0 | 1) => Ok(()),
        Some(files) => {
            let name = format!("split into {files} files");
            Err(LoadError::unsupported(metadata.path(), "GGUF", &name))
        }
    }
}

fn read_alignment(metadata: &Metadata) -> Result<usize, LoadError> {
    const KEY: &str = "general.alignment";
    let alignment = metadata.count(KEY, 1..=MAX_ALIGNMENT)?.unwrap_or(DEFAULT_ALIGNMENT);
    if alignment.is_power_of_two() {
        Ok(alignment)
    } else {
        Err(metadata.error(KEY, format!("is {alignment}; it must be a power of two")))
    }
}

/// Reads one tensor's info; its data range is still relative to the data's start.
fn read_tensor_info(reader: &mut Reader<'_>, alignment: usize) -> Result<TensorInfo, LoadError> {
    let name = reader.string("a tensor's name")?.to_owned();
    let path = reader.path();
    let error = |problem: String| LoadError::tensor(path.display().to_string(), &name, problem);
    let num_dimensions = reader.u32("a tensor's dimensions")?;
    if !(1..=MAX_DIMENSIONS).contains(&num_dimensions) {
        return Err(error(format!(
            "has {num_dimensions} dimensions; it must have 1 to {MAX_DIMENSIONS}"
        )));
    }
    let mut shape = Vec::new();
    for _ in 0..num_dimensions {
        let dimension = reader.u64("a tensor's dimensions")?;
        match usize::try_from(dimension) {
            Ok(dimension) if dimension > 0 => shape.push(dimension),
            _ => return Err(error(format!("has a dimension of {dimension}"))),
        }
    }
    shape.reverse();
    let dtype = tensor_type(reader.u32("a tensor's type")?)
        .map_err(|name| error(format!("has type {name}, which is not supported")))?;
    let size = tensor_bytes(&shape, dtype).map_err(error)?;
    let offset = reader.u64("a tensor's offset")?;
    let start =
        usize::try_from(offset).ok().filter(|start| start.is_multiple_of(alignment)).ok_or_else(
            || error(format!("has offset {offset}; it must be a multiple of {alignment}")),
        )?;
    let end = start
        .checked_add(size)
        .ok_or_else(|| error(format!("has offset {offset} and {size} bytes, which overflows")))?;
    Ok(TensorInfo { name, dtype, shape, data: start..end })
}

fn tensor_bytes(shape: &[usize], dtype: SourceDtype) -> Result<usize, String> {
    let cols = shape[shape.len() - 1];
    if !cols.is_multiple_of(dtype.block_elements()) {
        return Err(format!(
            "has rows of {cols} elements; {dtype} takes multiples of {}",
            dtype.block_elements()
        ));
    }
    shape
        .iter()
        .try_fold(1usize, |elements, &dim| elements.checked_mul(dim))
        .and_then(|elements| (elements / dtype.block_elements()).checked_mul(dtype.block_bytes()))
        .ok_or_else(|| format!("has shape {shape:?}, which overflows"))
}

fn check_names(path: &Path, tensors: &[TensorInfo]) -> Result<(), LoadError> {
    let mut seen = HashSet::with_capacity(tensors.len());
    match tensors.iter().find(|tensor| !seen.insert(tensor.name.as_str())) {
        Some(tensor) => {
            let location = path.display().to_string();
            Err(LoadError::tensor(location, &tensor.name, "is there twice"))
        }
        None => Ok(()),
    }
}

/// Makes data ranges absolute, having checked that they lie within the file and do not overlap.
fn place_data(
    path: &Path,
    tensors: &mut [TensorInfo],
    data_start: usize,
    file_len: usize,
) -> Result<(), LoadError> {
    let data_len = file_len.saturating_sub(data_start);
    let mut by_offset: Vec<&mut TensorInfo> = tensors.iter_mut().collect();
    by_offset.sort_by_key(|tensor| tensor.data.start);
    let mut end = 0;
    for tensor in by_offset {
        let Range { start, end: next_end } = tensor.data;
        let problem = if next_end > data_len {
            format!("ends at byte {next_end} of the data; the file holds {data_len}")
        } else if start < end {
            format!("starts at byte {start} of the data, within the tensor that ends at {end}")
        } else {
            end = next_end;
            tensor.data = data_start + start..data_start + next_end;
            continue;
        };
        return Err(LoadError::tensor(path.display().to_string(), &tensor.name, problem));
    }
    Ok(())
}
