//! Checking a model against recorded logits, through the whole engine.
//!
//! A golden file is a safetensors file with, for sequences `i` = 0, 1, …:
//!
//! | tensor | shape, type | what |
//! | --- | --- | --- |
//! | `ids_i` | `[T]` I64 | the prompt |
//! | `logits_i` | `[T, V]` F32 | logits at every position of it |
//! | `greedy_i` | `[G]` I64 | its greedy continuation, EOS not stopping it |
//! | `logits_bf16_i` | `[T, V]` F32 | logits of the same model cast to bfloat16; for bf16 runs |
//!
//! [`verify`] gives all sequences to the engine together, each twice: once *forced*, with prompt
//! and recorded continuation as one prompt, and once *generated*, with the continuation left to
//! the engine. The first is compared with the recording; the second, which takes the decode path,
//! with the first, bit for bit as long as the tokens are the same.

use crate::error::LoadError;
use crate::folder::ModelFolder;
use crate::mapped::map_file;
use quire_engine::{
    DType, Engine, EngineError, Request, RequestError, RequestId, RequestOutput, SamplingParams,
};
use safetensors::{Dtype, SafeTensors};
use serde::Serialize;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Largest accepted |Δlogit|, and distance of a golden token from the maximum, in f32.
pub const F32_TOLERANCE: f64 = 1e-3;
/// In bf16 the mean |Δlogit| may be this many times the recorded one.
pub const BF16_MEAN_FACTOR: f64 = 1.5;
/// In bf16 a golden token may be this many times the recorded largest |Δlogit| below the maximum:
/// both logits may have moved by as much.
pub const BF16_GREEDY_FACTOR: f64 = 2.0;
/// The golden file of a model folder that brings one.
const GOLDEN_FILE: &str = "golden.safetensors";
/// Most sequences in a golden file.
pub const MAX_GOLDEN_SEQUENCES: usize = 4096;

/// Why a model could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// A bf16 run needs to know how far bf16 moves the logits.
    #[error("the golden file has no tensor `logits_bf16_{sequence}`, which a bf16 run needs")]
    NoBf16 {
        /// The sequence without it.
        sequence: usize,
    },
    /// The golden file is of a model with another vocabulary.
    #[error("the golden file has logits of {golden} tokens; the model has {model}")]
    Vocabulary {
        /// In the file.
        golden: usize,
        /// In the model.
        model: usize,
    },
    /// The engine refused a sequence.
    #[error("golden sequence {sequence}: {source}")]
    Request {
        /// The sequence.
        sequence: usize,
        /// Why.
        source: RequestError,
    },
    /// A step failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Recorded sequences, checked against a vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub struct Golden {
    vocab_size: usize,
    sequences: Vec<GoldenSequence>,
}

#[derive(Clone, Debug, PartialEq)]
struct GoldenSequence {
    /// `[T]`
    ids: Vec<u32>,
    /// `[T, V]`
    logits: Vec<f32>,
    /// `[G]`
    greedy: Vec<u32>,
    /// `[T, V]`
    logits_bf16: Option<Vec<f32>>,
}

impl Golden {
    /// Reads a golden file for a model whose logits have `vocab_size` columns.
    ///
    /// # Errors
    /// The file cannot be read or is not safetensors; a tensor is missing, unexpected, of the
    /// wrong type or shape, or holds an id outside the vocabulary or a value that is not finite.
    pub fn open(path: &Path, vocab_size: usize) -> Result<Self, LoadError> {
        let data = map_file(path)?;
        let tensors = SafeTensors::deserialize(&data)
            .map_err(|e| LoadError::malformed(path, format!("is not a safetensors file: {e}")))?;
        let reader = GoldenReader { path, tensors: &tensors, vocab_size };
        let count = reader.num_sequences()?;
        let sequences = (0..count).map(|i| reader.sequence(i)).collect::<Result<_, _>>()?;
        Ok(Golden { vocab_size, sequences })
    }

    /// The path of the golden file in a model folder.
    ///
    /// # Errors
    /// There is none, or it is not a regular file within the folder.
    pub fn in_folder(folder: &Path) -> Result<PathBuf, LoadError> {
        let missing = || LoadError::malformed(folder, format!("holds no {GOLDEN_FILE}"));
        ModelFolder::open(folder)?.file(GOLDEN_FILE)?.ok_or_else(missing)
    }

    /// Number of sequences.
    pub fn len(&self) -> usize {
        self.sequences.len()
    }

    /// Whether there are no sequences; files without any are refused.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }
}

struct GoldenReader<'a> {
    path: &'a Path,
    tensors: &'a SafeTensors<'a>,
    vocab_size: usize,
}

impl GoldenReader<'_> {
    fn error(&self, tensor: &str, problem: String) -> LoadError {
        LoadError::tensor(self.path.display().to_string(), tensor, problem)
    }

    /// Counts the `ids_i`, and refuses names that belong to none of them.
    fn num_sequences(&self) -> Result<usize, LoadError> {
        let names = self.tensors.names();
        let count = names.iter().filter(|name| name.starts_with("ids_")).count();
        if !(1..=MAX_GOLDEN_SEQUENCES).contains(&count) {
            let problem =
                format!("has {count} tensors `ids_…`; 1 to {MAX_GOLDEN_SEQUENCES} are read");
            return Err(LoadError::malformed(self.path, problem));
        }
        for name in names {
            let known = ["ids_", "logits_bf16_", "logits_", "greedy_"]
                .iter()
                .filter_map(|kind| name.strip_prefix(kind)?.parse::<usize>().ok())
                .any(|i| i < count && name.ends_with(&format!("_{i}")));
            if !known {
                let problem = format!("does not belong to a golden file of {count} sequences");
                return Err(self.error(name, problem));
            }
        }
        Ok(count)
    }

    fn sequence(&self, i: usize) -> Result<GoldenSequence, LoadError> {
        let ids = self.ids(&format!("ids_{i}"))?;
        let missing = |name: &str| self.error(name, "is missing".to_owned());
        let logits = format!("logits_{i}");
        Ok(GoldenSequence {
            logits: self.logits(&logits, ids.len())?.ok_or_else(|| missing(&logits))?,
            logits_bf16: self.logits(&format!("logits_bf16_{i}"), ids.len())?,
            greedy: self.ids(&format!("greedy_{i}"))?,
            ids,
        })
    }

    /// `[n]` token ids, n at least 1.
    fn ids(&self, name: &str) -> Result<Vec<u32>, LoadError> {
        let Ok(tensor) = self.tensors.tensor(name) else {
            return Err(self.error(name, "is missing".to_owned()));
        };
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        if dtype != Dtype::I64 || shape.len() != 1 || shape[0] == 0 {
            let problem = format!("is {dtype:?} {shape:?}; it must be I64 [n] with n at least 1");
            return Err(self.error(name, problem));
        }
        let read = |(at, bytes): (usize, &[u8])| {
            let id = i64::from_le_bytes(bytes.try_into().expect("chunks of 8"));
            let vocab_size = self.vocab_size;
            u32::try_from(id).ok().filter(|&id| (id as usize) < vocab_size).ok_or_else(|| {
                let problem =
                    format!("has {id} at {at}, outside the model's vocabulary of {vocab_size}");
                self.error(name, problem)
            })
        };
        tensor.data().chunks_exact(8).enumerate().map(read).collect()
    }

    /// `[rows, V]` finite logits; `None` if there is no such tensor.
    fn logits(&self, name: &str, rows: usize) -> Result<Option<Vec<f32>>, LoadError> {
        let Ok(tensor) = self.tensors.tensor(name) else { return Ok(None) };
        let (dtype, shape, vocab_size) = (tensor.dtype(), tensor.shape(), self.vocab_size);
        if dtype != Dtype::F32 || shape != [rows, vocab_size] {
            let problem = format!(
                "is {dtype:?} {shape:?}; {rows} ids and the model's vocabulary need F32 \
                 [{rows}, {vocab_size}]"
            );
            return Err(self.error(name, problem));
        }
        let read = |(at, bytes): (usize, &[u8])| {
            let value = f32::from_le_bytes(bytes.try_into().expect("chunks of 4"));
            if value.is_finite() {
                return Ok(value);
            }
            let (row, column) = (at / vocab_size, at % vocab_size);
            Err(self.error(name, format!("has {value} at [{row}, {column}]; it must be finite")))
        };
        tensor.data().chunks_exact(4).enumerate().map(read).collect::<Result<_, _>>().map(Some)
    }
}

/// A measured value and the most it may be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bounded {
    /// Measured; infinite where a logit is not a number.
    pub value: f64,
    /// The most it may be.
    pub limit: f64,
}

impl Bounded {
    /// Within the limit.
    pub fn holds(&self) -> bool {
        self.value <= self.limit
    }
}

/// How one sequence compares.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SequenceReport {
    /// Tokens of the prompt, `T`.
    pub prompt_tokens: usize,
    /// Largest |Δlogit| over the prompt's positions; bounded in f32 only.
    pub max_abs_diff: Bounded,
    /// Mean |Δlogit| over the prompt's positions; bounded in bf16 only.
    pub mean_abs_diff: Bounded,
    /// Mean over the positions of KL(golden ‖ ours), in nats.
    pub kl_divergence: f64,
    /// Golden tokens of the continuation, `G`.
    pub greedy_tokens: usize,
    /// How many of them are our most likely token, after the golden ones before.
    pub greedy_agree: usize,
    /// How far a golden token's logit is below our largest, at most.
    pub greedy_gap: Bounded,
    /// Tokens the engine generated by itself that equal the golden ones, up to the first other.
    pub generated_agree: usize,
    /// Generating gave the same logits, bit for bit, as reading the same tokens as a prompt.
    pub decode_equals_prefill: bool,
    /// All bounds hold.
    pub passed: bool,
}

/// How a model compares with its golden file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VerifyReport {
    /// Every sequence is within its bounds.
    pub passed: bool,
    /// Steps the engine took for all sequences.
    pub num_steps: u64,
    /// Times that a sequence was preempted, its blocks to be computed anew.
    pub num_preempted_recompute: u64,
    /// Times that a sequence was preempted, its blocks copied to the host.
    pub num_preempted_swap: u64,
    /// In the order of the file.
    pub sequences: Vec<SequenceReport>,
}

/// Runs the golden sequences on `engine`, which must be idle.
///
/// # Errors
/// The golden file does not fit the model, the engine refuses a sequence, or a step fails. That
/// logits differ is no error, but a report.
pub fn verify(engine: &mut Engine, golden: &Golden) -> Result<VerifyReport, VerifyError> {
    assert_eq!(engine.num_unfinished(), 0, "verification needs an idle engine");
    let model = engine.model().vocab_size;
    if golden.vocab_size != model {
        return Err(VerifyError::Vocabulary { golden: golden.vocab_size, model });
    }
    let backend = engine.backend();
    if backend.dtype == DType::Bf16
        && let Some(sequence) = golden.sequences.iter().position(|s| s.logits_bf16.is_none())
    {
        return Err(VerifyError::NoBf16 { sequence });
    }
    let before = engine.stats();
    let runs = run(engine, &golden.sequences)?;
    let report = |(golden, runs): (&GoldenSequence, Runs)| {
        let mut report = compare(golden, &runs, backend.dtype, model);
        report.passed &= report.decode_equals_prefill || !backend.batch_invariant;
        report
    };
    let sequences: Vec<SequenceReport> = golden.sequences.iter().zip(runs).map(report).collect();
    let stats = engine.stats().since(&before);
    Ok(VerifyReport {
        passed: sequences.iter().all(|s| s.passed),
        num_steps: stats.num_steps,
        num_preempted_recompute: stats.scheduler.num_preempted_recompute,
        num_preempted_swap: stats.scheduler.num_preempted_swap,
        sequences,
    })
}

/// The two runs of a sequence.
struct Runs {
    forced: RequestOutput,
    generated: RequestOutput,
}

/// Runs every sequence both ways, all in one batch.
fn run(engine: &mut Engine, sequences: &[GoldenSequence]) -> Result<Vec<Runs>, VerifyError> {
    let mut ids = Vec::new();
    for (sequence, golden) in sequences.iter().enumerate() {
        let forced = [golden.ids.as_slice(), &golden.greedy[..golden.greedy.len() - 1]].concat();
        let generated = request(golden.ids.clone(), golden.greedy.len());
        for request in [request(forced, 1), generated] {
            match engine.add_request(request) {
                Ok(id) => ids.push(id),
                Err(source) => {
                    ids.into_iter().for_each(|id| drop(engine.abort(id)));
                    return Err(VerifyError::Request { sequence, source });
                }
            }
        }
    }
    let mut outputs = HashMap::new();
    while engine.num_unfinished() > 0 {
        outputs.extend(engine.step()?.finished.into_iter().map(|o| (o.request_id, o)));
    }
    let mut take = |id: &RequestId| outputs.remove(id).expect("every request ends once");
    let runs = ids.chunks_exact(2);
    Ok(runs.map(|pair| Runs { forced: take(&pair[0]), generated: take(&pair[1]) }).collect())
}

fn request(prompt: Vec<u32>, max_tokens: usize) -> Request {
    let params = SamplingParams {
        temperature: 0.0,
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        detokenize: false,
        ..Default::default()
    };
    Request { capture_logits: true, ..Request::new(prompt, params) }
}

fn compare(
    golden: &GoldenSequence,
    runs: &Runs,
    dtype: DType,
    vocab_size: usize,
) -> SequenceReport {
    let prompt_tokens = golden.ids.len();
    let logits = &runs.forced.logits;
    assert_eq!(logits.len(), prompt_tokens + golden.greedy.len() - 1, "a row a position");
    let rows = || golden.logits.chunks_exact(vocab_size);
    let ours = Difference::of(rows().zip(logits.iter().map(Vec::as_slice)));
    let (max_limit, mean_limit, gap_limit) = match &golden.logits_bf16 {
        Some(bf16) if dtype == DType::Bf16 => {
            let recorded = Difference::of(rows().zip(bf16.chunks_exact(vocab_size)));
            let mean = BF16_MEAN_FACTOR * recorded.mean;
            (f64::INFINITY, mean, BF16_GREEDY_FACTOR * recorded.max)
        }
        _ => (F32_TOLERANCE, f64::INFINITY, F32_TOLERANCE),
    };
    let kl: f64 = rows().zip(logits).map(|(g, o)| kl_divergence(g, o)).sum();
    let mut greedy_agree = 0;
    let mut gap: f64 = 0.0;
    for (&token, row) in golden.greedy.iter().zip(&logits[prompt_tokens - 1..]) {
        let below = |&other: &f32| f64::from(other) - f64::from(row[token as usize]);
        let below = row.iter().map(below).fold(0.0, worst);
        greedy_agree += usize::from(below == 0.0);
        gap = worst(gap, below);
    }
    let generated_agree = runs.generated.token_ids.iter().zip(&golden.greedy);
    let generated_agree = generated_agree.take_while(|(a, b)| a == b).count();
    // The token after the last equal one was drawn from a row whose history is still the same.
    let same_history = (prompt_tokens + generated_agree).min(logits.len());
    let mut report = SequenceReport {
        prompt_tokens,
        max_abs_diff: Bounded { value: ours.max, limit: max_limit },
        mean_abs_diff: Bounded { value: ours.mean, limit: mean_limit },
        // Rounding may leave it a hair below the 0 that it cannot be under.
        kl_divergence: (kl / prompt_tokens as f64).max(0.0),
        greedy_tokens: golden.greedy.len(),
        greedy_agree,
        greedy_gap: Bounded { value: gap, limit: gap_limit },
        generated_agree,
        decode_equals_prefill: bits_equal(
            &logits[..same_history],
            runs.generated.logits.get(..same_history).unwrap_or(&[]),
        ),
        passed: false,
    };
    report.passed =
        [report.max_abs_diff, report.mean_abs_diff, report.greedy_gap].iter().all(Bounded::holds);
    report
}

fn bits_equal(a: &[Vec<f32>], b: &[Vec<f32>]) -> bool {
    let bits = |rows: &[Vec<f32>]| -> Vec<u32> {
        rows.iter().flatten().map(|value| value.to_bits()).collect()
    };
    a.len() == b.len() && bits(a) == bits(b)
}

/// The larger of two, where what is not a number is larger than any.
fn worst(a: f64, b: f64) -> f64 {
    if b.is_nan() { f64::INFINITY } else { a.max(b) }
}

/// |Δlogit| over some rows; infinite where one is not a number.
struct Difference {
    max: f64,
    mean: f64,
}

impl Difference {
    fn of<'a>(rows: impl Iterator<Item = (&'a [f32], &'a [f32])>) -> Self {
        let (mut max, mut sum, mut count) = (0.0, 0.0, 0usize);
        for (a, b) in rows.flat_map(|(a, b)| a.iter().zip(b)) {
            let diff = worst(0.0, (f64::from(*a) - f64::from(*b)).abs());
            max = worst(max, diff);
            sum += diff;
            count += 1;
        }
        Difference { max, mean: sum / count.max(1) as f64 }
    }
}

/// KL(softmax(p) ‖ softmax(q)) in nats.
fn kl_divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_sum = |row: &[f32]| {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
        f64::from(max) + sum.ln()
    };
    let (p_sum, q_sum) = (log_sum(p), log_sum(q));
    let term = |(&p, &q): (&f32, &f32)| {
        let log_p = f64::from(p) - p_sum;
        log_p.exp() * (log_p - (f64::from(q) - q_sum))
    };
    p.iter().zip(q).map(term).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    /// A name, a type, a shape and the bytes of one element, repeated.
    type Tensor<'a> = (&'a str, Dtype, &'a [usize], &'a [u8]);

    const ID: &[u8] = &3i64.to_le_bytes();
    const LOGIT: &[u8] = &1.5f32.to_le_bytes();
    const GOOD: [Tensor<'static>; 3] = [
        ("ids_0", Dtype::I64, &[2], ID),
        ("logits_0", Dtype::F32, &[2, 4], LOGIT),
        ("greedy_0", Dtype::I64, &[1], ID),
    ];

    fn open(tensors: &[Tensor<'_>]) -> Result<Golden, LoadError> {
        let data: Vec<Vec<u8>> =
            tensors.iter().map(|(_, _, shape, e)| e.repeat(shape.iter().product())).collect();
        let views = tensors.iter().zip(&data).map(|((name, dtype, shape, _), data)| {
            (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap())
        });
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), safetensors::serialize(views, None).unwrap()).unwrap();
        Golden::open(file.path(), 4)
    }

    #[test]
    fn a_golden_file_is_read() {
        let golden = open(&GOOD).unwrap();
        let sequence = GoldenSequence {
            ids: vec![3, 3],
            logits: vec![1.5; 8],
            greedy: vec![3],
            logits_bf16: None,
        };
        assert_eq!(golden, Golden { vocab_size: 4, sequences: vec![sequence] });
    }

    #[test]
    fn a_folder_has_its_own_golden_file_or_none() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("model");
        std::fs::create_dir(&folder).unwrap();
        let error = Golden::in_folder(&folder).unwrap_err().to_string();
        assert!(error.ends_with("holds no golden.safetensors"), "{error}");
        let path = folder.join(GOLDEN_FILE);
        std::fs::write(&path, "").unwrap();
        assert_eq!(Golden::in_folder(&folder).unwrap(), path);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        let error = Golden::in_folder(&folder).unwrap_err().to_string();
        assert!(error.ends_with("is not a regular file"), "{error}");
        #[cfg(unix)]
        {
            std::fs::remove_dir(&path).unwrap();
            std::fs::write(dir.path().join("outside"), "").unwrap();
            std::os::unix::fs::symlink("../outside", &path).unwrap();
            let error = Golden::in_folder(&folder).unwrap_err().to_string();
            assert!(error.ends_with("is a link out of the model folder"), "{error}");
        }
    }

    #[test]
    fn names_and_shapes_from_the_file_are_cut() {
        let name = format!("ids_{}", "9\u{1b}".repeat(10_000));
        let error = open(&[(&name, Dtype::I64, &[1], ID)]).unwrap_err().to_string();
        assert!(error.len() < 3000 && !error.contains('\u{1b}'), "{}", error.len());
        let shape = [1; 10_000];
        let error = open(&[("ids_0", Dtype::I64, &shape, ID)]).unwrap_err().to_string();
        assert!(error.len() < 3000, "{}", error.len());
    }

    #[test]
    fn what_does_not_fit_is_refused_by_tensor() {
        let outside: &[u8] = &4i64.to_le_bytes();
        let negative: &[u8] = &(-1i64).to_le_bytes();
        let infinite: &[u8] = &f32::INFINITY.to_le_bytes();
        let replaced: [(Tensor<'_>, &str); 9] = [
            (("ids_0", Dtype::I64, &[0], ID), "is I64 [0]"),
            (("ids_0", Dtype::I64, &[2, 1], ID), "is I64 [2, 1]"),
            (("ids_0", Dtype::F32, &[2], LOGIT), "is F32 [2]"),
            (("ids_0", Dtype::I64, &[2], outside), "has 4 at 0, outside"),
            (("greedy_0", Dtype::I64, &[1], negative), "has -1 at 0, outside"),
            (("greedy_0", Dtype::I64, &[0], ID), "is I64 [0]"),
            (("logits_0", Dtype::F32, &[2, 5], LOGIT), "need F32 [2, 4]"),
            (("logits_0", Dtype::F32, &[3, 4], LOGIT), "need F32 [2, 4]"),
            (("logits_0", Dtype::F32, &[2, 4], infinite), "has inf at [0, 0]"),
        ];
        for (tensor, problem) in replaced {
            let tensors = GOOD.map(|good| if good.0 == tensor.0 { tensor } else { good });
            let error = open(&tensors).unwrap_err().to_string();
            assert!(error.contains(&format!("tensor `{}`", tensor.0)), "{error}");
            assert!(error.contains(problem), "{error}");
        }
        for (name, missing) in ["ids_0", "logits_0", "greedy_0"].iter().zip(0..) {
            let tensors: Vec<_> = (0..3).filter(|&i| i != missing).map(|i| GOOD[i]).collect();
            assert!(open(&tensors).unwrap_err().to_string().contains(&name[..4]));
        }
        for extra in ["ids_2", "logits_1", "logits_bf16_x", "greedy_00", "weight"] {
            let error = open(&[&GOOD[..], &[(extra, Dtype::F32, &[2, 4], LOGIT)]].concat());
            assert!(error.unwrap_err().to_string().contains("does not belong"), "{extra}");
        }
    }

    #[test]
    fn what_is_not_a_number_is_infinitely_far() {
        let difference = Difference::of([(&[1.0, 2.0][..], &[1.5, f32::NAN][..])].into_iter());
        assert_eq!((difference.max, difference.mean), (f64::INFINITY, f64::INFINITY));
        let difference = Difference::of([(&[1.0, 2.0][..], &[1.5, 2.25][..])].into_iter());
        assert_eq!((difference.max, difference.mean), (0.5, 0.375));
    }

    #[test]
    fn divergence_is_that_of_the_softmaxes() {
        let (p, q) = ([0.0, 3f32.ln()], [5.0, 5.0]);
        let expected = 0.25 * (0.25f64 / 0.5).ln() + 0.75 * (0.75f64 / 0.5).ln();
        assert!((kl_divergence(&p, &q) - expected).abs() < 1e-7);
        assert_eq!(kl_divergence(&q, &q), 0.0);
    }
}
