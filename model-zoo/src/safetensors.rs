//! Weights in safetensors files: one `model.safetensors`, or shards named by
//! `model.safetensors.index.json`.
//!
//! ```text
//! [8 bytes: header length, little endian][header: JSON][tensor data, gapless, in offset order]
//! ```
//!
//! The index's weight_map decides which shard holds a tensor. Files may come from anyone: lengths,
//! offsets, shapes and names are checked against each other and against the file before use.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
    ops::Range,
    path::{Path, PathBuf},
};

use memmap2::Mmap;
use safetensors::{Dtype, tensor::TensorInfo};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use crate::{
    dequant::dequantise,
    error::{LoadError, check_limit, quoted},
    folder::ModelFolder,
    mapped::{map_file, release},
    source::{SourceDtype, WeightSource, row_bytes},
};

/// Longest header, in bytes (the format's own limit).
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Longest index file, in bytes.
pub const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Most shards an index may name.
pub const MAX_SHARDS: usize = 4096;

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// The safetensors files of one model folder, memory-mapped.
///
/// The files must not change while the source lives.
pub struct SafetensorsSource {
    folder: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Entry>,
}

struct Shard {
    path: PathBuf,
    data: Mmap,
}

struct Entry {
    /// Index into `SafetensorsSource::shards`.
    shard: usize,
    tensor: TensorHeader,
}

/// One tensor as a header describes it, checked.
#[derive(Debug, Clone, PartialEq)]
struct TensorHeader {
    name: String,
    dtype: SourceDtype,
    shape: Vec<usize>,
    /// Bytes within the file.
    data: Range<usize>,
}

impl SafetensorsSource {
    /// Maps the safetensors files of a folder and checks their headers; no weights are read.
    ///
    /// # Errors
    /// There is no safetensors file, a shard is missing or outside the folder, index and shards
    /// disagree, or a header is malformed.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        let folder = ModelFolder::open(dir)?;
        let mut source =
            Self { folder: dir.to_owned(), shards: Vec::new(), tensors: BTreeMap::new() };
        if let Some(path) = folder.file(SINGLE_FILE)? {
            for tensor in source.add_shard(path)? {
                source.tensors.insert(tensor.name.clone(), Entry { shard: 0, tensor });
            }
            return Ok(source);
        }
        match folder.read_text(INDEX_FILE, MAX_INDEX_BYTES)? {
            Some(index) => source.add_indexed(&folder, &index)?,
            None => {
                let problem = format!("holds neither {SINGLE_FILE} nor {INDEX_FILE}");
                return Err(LoadError::malformed(dir, problem));
            }
        }
        Ok(source)
    }

    /// Maps one file and returns its tensors.
    fn add_shard(&mut self, path: PathBuf) -> Result<Vec<TensorHeader>, LoadError> {
        let data = map_file(&path)?;
        let tensors = parse_header(&path, &data)?;
        self.shards.push(Shard { path, data });
        Ok(tensors)
    }

    fn add_indexed(&mut self, folder: &ModelFolder, index: &str) -> Result<(), LoadError> {
        let index_path = folder.path().join(INDEX_FILE);
        let mut missing = parse_index(&index_path, index)?;
        let names: HashSet<&String> = missing.values().collect();
        check_limit(&index_path, "number of shards", names.len() as u64, MAX_SHARDS as u64)?;
        let mut names: Vec<String> = names.into_iter().cloned().collect();
        names.sort();
        for name in names {
            let Some(path) = folder.file(&name)? else {
                let problem = format!("names shard {}, which is missing", quoted(&name));
                return Err(LoadError::malformed(&index_path, problem));
            };
            let shard = self.shards.len();
            for tensor in self.add_shard(path)? {
                if missing.remove(&tensor.name).is_none_or(|file| file != name) {
                    let problem = format!("is in this file, but not so in {INDEX_FILE}");
                    let path = self.shards[shard].path.display().to_string();
                    return Err(LoadError::tensor(path, &tensor.name, problem));
                }
                self.tensors.insert(tensor.name.clone(), Entry { shard, tensor });
            }
        }
        match missing.into_iter().min() {
            Some((tensor, file)) => {
                let path = folder.path().join(file).display().to_string();
                let problem = format!("{INDEX_FILE} says it is in this file; it is not");
                Err(LoadError::tensor(path, &tensor, problem))
            }
            None => Ok(()),
        }
    }
}

impl WeightSource for SafetensorsSource {
    fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|entry| &entry.tensor.shape[..])
    }

    fn dtype(&self, name: &str) -> Option<SourceDtype> {
        self.tensors.get(name).map(|entry| entry.tensor.dtype)
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn read_row(&self, name: &str, row: usize, out: &mut [f32]) -> Result<(), LoadError> {
        let error = |problem: String| LoadError::tensor(self.location(name), name, problem);
        let Entry { shard, tensor } =
            self.tensors.get(name).ok_or_else(|| error("does not exist".into()))?;
        let bytes = row_bytes(&tensor.shape, tensor.dtype, row, out.len()).map_err(error)?;
        let data = &self.shards[*shard].data[tensor.data.clone()];
        dequantise(tensor.dtype, &data[bytes], out);
        Ok(())
    }

    fn stored_row(&self, name: &str, row: usize) -> Option<&[u8]> {
        let Entry { shard, tensor } = self.tensors.get(name)?;
        let cols = *tensor.shape.last()?;
        let bytes = row_bytes(&tensor.shape, tensor.dtype, row, cols).ok()?;
        self.shards[*shard].data[tensor.data.clone()].get(bytes)
    }

    fn release(&self, name: &str, rows: Range<usize>) {
        if let Some(Entry { shard, tensor }) = self.tensors.get(name) {
            release(&self.shards[*shard].data, &tensor.shape, &tensor.data, rows);
        }
    }

    fn location(&self, name: &str) -> String {
        let path = match self.tensors.get(name) {
            Some(entry) => &self.shards[entry.shard].path,
            None => &self.folder,
        };
        path.display().to_string()
    }
}

/// Checks the contents of one safetensors file as [`SafetensorsSource::open`] does; `path` is what
/// messages call it.
///
/// # Errors
/// The header is malformed, or does not describe the rest of the file.
pub fn check_file(path: &Path, contents: &[u8]) -> Result<(), LoadError> {
    parse_header(path, contents).map(drop)
}

/// The tensors of a file, in offset order.
fn parse_header(path: &Path, file: &[u8]) -> Result<Vec<TensorHeader>, LoadError> {
    let malformed = |problem: String| LoadError::malformed(path, problem);
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(malformed(format!("has {} bytes; the header length takes 8", file.len())));
    };
    let length = u64::from_le_bytes(*length);
    check_limit(path, "header length in bytes", length, MAX_HEADER_BYTES)?;
    check_limit(path, "header length in bytes", length, rest.len() as u64)?;
    let (header, data) = rest.split_at(length as usize);
    let header = str::from_utf8(header)
        .map_err(|e| malformed(format!("the header is not UTF-8 at byte {}", e.valid_up_to())))?;
    let Header(mut tensors) = serde_json::from_str(header)
        .map_err(|e| malformed(format!("the header cannot be read: {e}")))?;

    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let data_start = file.len() - data.len();
    let mut end = 0;
    let mut checked = Vec::with_capacity(tensors.len());
    for (name, info) in tensors {
        let error = |problem: String| LoadError::tensor(path.display().to_string(), &name, problem);
        let range = check_offsets(&info, end, data.len()).map_err(error)?;
        end = range.end;
        let Some(dtype) = source_dtype(info.dtype) else {
            return Err(error(format!("has type {:?}, which is not supported", info.dtype)));
        };
        let data = data_start + range.start..data_start + range.end;
        checked.push(TensorHeader { name, dtype, shape: info.shape, data });
    }
    if end != data.len() {
        return Err(malformed(format!("{} bytes follow the last tensor", data.len() - end)));
    }
    Ok(checked)
}

/// Checks that a tensor starts where the one before ended, fits the file and fits its shape.
fn check_offsets(info: &TensorInfo, start: usize, limit: usize) -> Result<Range<usize>, String> {
    let (from, to) = info.data_offsets;
    if to < from {
        return Err(format!("data_offsets [{from}, {to}] are reversed"));
    }
    if to > limit {
        return Err(format!("data_offsets end at {to}; the file holds {limit} bytes of data"));
    }
    if from < start {
        return Err(format!("data_offsets [{from}, {to}] overlap the tensor that ends at {start}"));
    }
    if from > start {
        return Err(format!("data_offsets [{from}, {to}] leave a gap after {start}"));
    }
    let bits = info
        .shape
        .iter()
        .try_fold(info.dtype.bitsize(), |bits, &dim| bits.checked_mul(dim))
        .ok_or_else(|| format!("shape {:?} overflows", info.shape))?;
    if (to - from).checked_mul(8) != Some(bits) {
        return Err(format!(
            "shape {:?} of {:?} takes {} bytes; data_offsets [{from}, {to}] give {}",
            info.shape,
            info.dtype,
            bits.div_ceil(8),
            to - from
        ));
    }
    Ok(from..to)
}

fn source_dtype(dtype: Dtype) -> Option<SourceDtype> {
    match dtype {
        Dtype::F32 => Some(SourceDtype::F32),
        Dtype::F16 => Some(SourceDtype::F16),
        Dtype::BF16 => Some(SourceDtype::Bf16),
        _ => None,
    }
}

/// A header's tensors in file order, names unique. The safetensors crate collects them into a map,
/// where the last of two equal names silently wins, so the object is walked here.
struct Header(Vec<(String, TensorInfo)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut seen = HashSet::new();
                let mut tensors = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !seen.insert(name.clone()) {
                        return Err(A::Error::custom(format!("{} is there twice", quoted(&name))));
                    }
                    let named = |e| A::Error::custom(format!("{}: {e}", quoted(&name)));
                    if name == "__metadata__" {
                        map.next_value::<HashMap<String, String>>().map_err(named)?;
                    } else {
                        let info = map.next_value::<TensorInfo>().map_err(named)?;
                        tensors.push((name, info));
                    }
                }
                Ok(Header(tensors))
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// Tensor name → shard file name.
fn parse_index(path: &Path, index: &str) -> Result<HashMap<String, String>, LoadError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: WeightMap,
    }
    let index: Index = serde_json::from_str(index)
        .map_err(|e| LoadError::malformed(path, format!("cannot be read: {e}")))?;
    Ok(index.weight_map.0)
}

/// A JSON object of strings whose keys are unique.
struct WeightMap(HashMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WeightMapVisitor;
        impl<'de> Visitor<'de> for WeightMapVisitor {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut files = HashMap::new();
                while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                    if files.contains_key(&tensor) {
                        return Err(A::Error::custom(format!(
                            "{} is there twice",
                            quoted(&tensor)
                        )));
                    }
                    files.insert(tensor, file);
                }
                Ok(WeightMap(files))
            }
        }
        deserializer.deserialize_map(WeightMapVisitor)
    }
}

#[cfg(test)]
mod tests;
