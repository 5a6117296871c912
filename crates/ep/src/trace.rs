//! Routing traces: the choices of a real router, recorded in a `.safetensors` file.
//!
//! The file has two tensors for each layer L and rank R: `layer{L}.rank{R}.topk_idx` (i32 `[T, K]`, -1 = no expert) and
//! `layer{L}.rank{R}.topk_weights` (f32 `[T, K]`). T, the number of tokens, may differ between ranks but is equal in
//! all layers. The metadata holds `format` = `hybrid-ep-routing`, `version` = `1`, the numbers `experts`, `topk`,
//! `layers` and `ranks`, and optionally `source`.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::error::{CallerError, EnvironmentError, Error, Result};
use crate::routing::Routing;
use crate::topology::Rank;

/// The recorded routings of some layers and ranks. Reading checks the whole trace.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutingTrace {
    /// Number of experts.
    pub experts: usize,
    /// Maximum number of experts of a token.
    pub topk: usize,
    /// How the trace was made, if the file says.
    pub source: Option<String>,
    /// The routings, indexed by layer and then by rank.
    pub layers: Vec<Vec<Routing>>,
}

impl RoutingTrace {
    /// Maximum size of a file, in bytes: reading holds the file and its routings in memory.
    pub const MAX_BYTES: u64 = 1 << 30;

    /// Reads and checks a trace: a regular file of at most [`MAX_BYTES`](Self::MAX_BYTES).
    ///
    /// # Errors
    /// [`EnvironmentError`] when the file cannot be read; [`CallerError::Trace`] that says what is wrong with the file,
    /// and where.
    pub fn read(path: &Path) -> Result<Self> {
        let wrong = |problem| CallerError::Trace { path: path.display().to_string(), problem };
        let unreadable = |error| {
            Error::from(EnvironmentError::new(
                format!("reading routing trace {}", path.display()),
                error,
                "give the path of a .safetensors file",
            ))
        };
        // Check the type before opening: opening a pipe waits for a writer, and a device may have no end.
        if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
            return Err(wrong("is not a regular file; give the path of a .safetensors file".into()).into());
        }
        let mut bytes = Vec::new();
        File::open(path)
            .and_then(|file| file.take(Self::MAX_BYTES + 1).read_to_end(&mut bytes))
            .map_err(unreadable)?;
        if bytes.len() as u64 > Self::MAX_BYTES {
            return Err(
                wrong(format!("has more than {} bytes, the limit for a trace", Self::MAX_BYTES)).into()
            );
        }
        Self::from_bytes(&bytes).map_err(|problem| wrong(problem).into())
    }

    /// Reads and checks a trace from the bytes of a file.
    ///
    /// # Errors
    /// A sentence for the user that says what is wrong, and where.
    pub fn from_bytes(bytes: &[u8]) -> std::result::Result<Self, String> {
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| not_safetensors(bytes, &e))?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| not_safetensors(bytes, &e))?;
        let empty = HashMap::new();
        let header = Header::read(metadata.metadata().as_ref().unwrap_or(&empty))?;
        let mut layers = Vec::with_capacity(header.layers);
        for layer in 0..header.layers {
            let ranks: std::result::Result<Vec<_>, String> =
                (0..header.ranks).map(|rank| read_pair(&tensors, &header, layer, rank)).collect();
            layers.push(ranks?);
        }
        check_tokens(&layers)?;
        Ok(Self { experts: header.experts, topk: header.topk, source: header.source, layers })
    }

    /// Number of ranks that the trace was recorded on.
    pub fn ranks(&self) -> usize {
        self.layers.first().map_or(0, Vec::len)
    }

    /// The routings of a layer for `ranks` ranks. If the trace has a different number of ranks, the recorded tokens of all
    /// ranks, in rank order, are split into `ranks` nearly equal runs.
    ///
    /// # Errors
    /// Those of [`Routing::from_topk`]. A trace from [`read`](Self::read) or [`from_bytes`](Self::from_bytes) causes none.
    ///
    /// # Panics
    /// When the trace has no such layer.
    pub fn spread(&self, layer: usize, ranks: usize) -> Result<Vec<Routing>> {
        let recorded = &self.layers[layer];
        if recorded.len() == ranks {
            return Ok(recorded.clone());
        }
        let all: Vec<(&[u32], &[f32])> = recorded
            .iter()
            .flat_map(|routing| (0..routing.tokens()).map(|t| (routing.experts_of(t), routing.weights_of(t))))
            .collect();
        (0..ranks)
            .map(|rank| {
                let run = &all[all.len() * rank / ranks..all.len() * (rank + 1) / ranks];
                let mut idx = vec![-1; run.len() * self.topk];
                let mut weights = vec![0.0; run.len() * self.topk];
                for (token, (experts, row_weights)) in run.iter().enumerate() {
                    for (k, (&expert, &weight)) in experts.iter().zip(*row_weights).enumerate() {
                        idx[token * self.topk + k] = expert as i32;
                        weights[token * self.topk + k] = weight;
                    }
                }
                Routing::from_topk(Rank(rank as u32), self.experts, self.topk, &idx, &weights)
            })
            .collect()
    }
}

/// Checks that each rank has the same number of tokens in every layer.
fn check_tokens(layers: &[Vec<Routing>]) -> std::result::Result<(), String> {
    let Some((first, others)) = layers.split_first() else { return Ok(()) };
    for (layer, ranks) in others.iter().enumerate() {
        for (rank, (expected, found)) in first.iter().zip(ranks).enumerate() {
            if expected.tokens() != found.tokens() {
                let (expected, found) = (expected.tokens(), found.tokens());
                return Err(format!(
                    "rank {rank} has {expected} tokens in layer 0 and {found} in layer {}",
                    layer + 1
                ));
            }
        }
    }
    Ok(())
}

struct Header {
    experts: usize,
    topk: usize,
    layers: usize,
    ranks: usize,
    source: Option<String>,
}

impl Header {
    fn read(metadata: &HashMap<String, String>) -> std::result::Result<Self, String> {
        let text = |key: &str| metadata.get(key).ok_or_else(|| format!("metadata has no `{key}`"));
        for (key, expected) in [("format", "hybrid-ep-routing"), ("version", "1")] {
            let found = text(key)?;
            if found != expected {
                return Err(format!("metadata `{key}` is `{found}`, expected `{expected}`"));
            }
        }
        let number = |key: &str| -> std::result::Result<usize, String> {
            let value = text(key)?;
            match value.parse() {
                Ok(number) if (1..=1 << 20).contains(&number) => Ok(number),
                _ => Err(format!(
                    "metadata `{key}` is `{value}`, expected a whole number from 1 to {}",
                    1 << 20
                )),
            }
        };
        Ok(Self {
            experts: number("experts")?,
            topk: number("topk")?,
            layers: number("layers")?,
            ranks: number("ranks")?,
            source: metadata.get("source").cloned(),
        })
    }
}

fn not_safetensors(bytes: &[u8], error: &safetensors::SafeTensorError) -> String {
    format!("{} bytes are not a whole .safetensors file ({error}); is it truncated?", bytes.len())
}

fn read_pair(
    tensors: &SafeTensors<'_>,
    header: &Header,
    layer: usize,
    rank: usize,
) -> std::result::Result<Routing, String> {
    let idx_name = format!("layer{layer}.rank{rank}.topk_idx");
    let weights_name = format!("layer{layer}.rank{rank}.topk_weights");
    let idx = find(tensors, &idx_name, Dtype::I32, header.topk)?;
    let weights = find(tensors, &weights_name, Dtype::F32, header.topk)?;
    if idx.shape() != weights.shape() {
        return Err(format!("{weights_name} has shape {:?}, {idx_name} {:?}", weights.shape(), idx.shape()));
    }
    let indices: Vec<i32> = words(&idx).map(i32::from_le_bytes).collect();
    let weights: Vec<f32> = words(&weights).map(f32::from_le_bytes).collect();
    if let Some(at) = weights.iter().position(|weight| weight.is_infinite()) {
        return Err(format!("tensor {weights_name}, row {}: a weight is infinite", at / header.topk));
    }
    Routing::from_topk(Rank(rank as u32), header.experts, header.topk, &indices, &weights)
        .map_err(|error| format!("layer {layer}: {error}"))
}

fn find<'a>(
    tensors: &SafeTensors<'a>,
    name: &str,
    dtype: Dtype,
    topk: usize,
) -> std::result::Result<TensorView<'a>, String> {
    let view = tensors.tensor(name).map_err(|_| format!("tensor {name} is missing"))?;
    if view.dtype() != dtype {
        return Err(format!("tensor {name} is {:?}, expected {dtype:?}", view.dtype()));
    }
    match view.shape() {
        [_, k] if *k == topk => Ok(view),
        shape => Err(format!("tensor {name} has shape {shape:?}, expected [tokens, {topk}]")),
    }
}

fn words<'a>(view: &TensorView<'a>) -> impl Iterator<Item = [u8; 4]> + use<'a> {
    view.data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(idx: &[i32], weights: &[f32], shape: [usize; 2], metadata: &[(&str, &str)]) -> Vec<u8> {
        let idx: Vec<u8> = idx.iter().flat_map(|v| v.to_le_bytes()).collect();
        let weights: Vec<u8> = weights.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut tensors = HashMap::new();
        tensors.insert(
            "layer0.rank0.topk_idx".to_string(),
            TensorView::new(Dtype::I32, shape.to_vec(), &idx).unwrap(),
        );
        tensors.insert(
            "layer0.rank0.topk_weights".to_string(),
            TensorView::new(Dtype::F32, shape.to_vec(), &weights).unwrap(),
        );
        let mut all: HashMap<String, String> = [
            ("format", "hybrid-ep-routing"),
            ("version", "1"),
            ("experts", "8"),
            ("topk", "2"),
            ("layers", "1"),
            ("ranks", "1"),
        ]
        .map(|(k, v)| (k.to_string(), v.to_string()))
        .into();
        all.extend(metadata.iter().map(|(k, v)| (k.to_string(), v.to_string())));
        safetensors::serialize(tensors, Some(all)).unwrap()
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn a_file_is_read_as_its_bytes_are() {
        let bytes = file(&[0, 7], &[0.5, 0.5], [1, 2], &[]);
        let path = std::env::temp_dir().join(format!("hybrid-ep-trace-{}", std::process::id()));
        std::fs::write(&path, &bytes).unwrap();
        let read = RoutingTrace::read(&path);
        std::fs::remove_file(&path).unwrap();
        let (read, given) = (read.unwrap(), RoutingTrace::from_bytes(&bytes).unwrap());
        assert_eq!((read.experts, read.layers), (given.experts, given.layers));
    }

    #[test]
    fn a_trace_is_read_and_spread() {
        let bytes =
            file(&[0, 7, 3, -1, 2, 1], &[0.5, 0.5, 1.0, 0.0, 0.3, 0.7], [3, 2], &[("source", "by hand")]);
        let trace = RoutingTrace::from_bytes(&bytes).unwrap();
        assert_eq!(
            (trace.experts, trace.topk, trace.ranks(), trace.source.as_deref()),
            (8, 2, 1, Some("by hand"))
        );
        assert_eq!(trace.layers[0][0].experts_of(1), [3]);
        let spread = trace.spread(0, 2).unwrap();
        assert_eq!(spread.iter().map(Routing::tokens).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(spread[1].experts_of(1), [1, 2]);
        assert_eq!(spread[1].weights_of(1), [0.7, 0.3]);
        assert_eq!(trace.spread(0, 1).unwrap(), trace.layers[0]);
    }

    #[test]
    fn errors_say_what_is_wrong_and_where() {
        let good = file(&[0, 1], &[0.5; 2], [1, 2], &[]);
        let problem = |bytes: &[u8]| RoutingTrace::from_bytes(bytes).unwrap_err();
        for cut in [0, 4, 40, good.len() - 1] {
            assert!(problem(&good[..cut]).contains("truncated"), "{cut}: {}", problem(&good[..cut]));
        }
        let with = |key, value| problem(&file(&[0, 1], &[0.5; 2], [1, 2], &[(key, value)]));
        assert_eq!(with("format", "gguf"), "metadata `format` is `gguf`, expected `hybrid-ep-routing`");
        assert!(with("experts", "0").contains("expected a whole number from 1"));
        assert_eq!(with("ranks", "2"), "tensor layer0.rank1.topk_idx is missing");
        assert_eq!(with("topk", "3"), "tensor layer0.rank0.topk_idx has shape [1, 2], expected [tokens, 3]");
        let bad = problem(&file(&[0, 1, 2, 3], &[0.5, 0.5, f32::INFINITY, 0.5], [2, 2], &[]));
        assert_eq!(bad, "tensor layer0.rank0.topk_weights, row 1: a weight is infinite");
        let bad = problem(&file(&[0, 8], &[0.5; 2], [1, 2], &[]));
        assert_eq!(
            bad,
            "layer 0: routing of rank 0, row 0: expert index 8 is out of range: must be -1 (none) or 0 to 7"
        );
    }

    #[test]
    fn layers_with_different_numbers_of_tokens_are_refused() {
        let empty = |tokens: usize| {
            Routing::from_map(Rank(0), 2, &vec![0; 2 * tokens], &vec![0.0; 2 * tokens]).unwrap()
        };
        assert_eq!(check_tokens(&[vec![empty(3)], vec![empty(3)]]), Ok(()));
        let error = check_tokens(&[vec![empty(3)], vec![empty(3)], vec![empty(4)]]).unwrap_err();
        assert_eq!(error, "rank 0 has 3 tokens in layer 0 and 4 in layer 2");
    }

    #[test]
    fn the_error_of_a_missing_file_names_it() {
        let error = RoutingTrace::read(Path::new("/no/such/trace.safetensors")).unwrap_err().to_string();
        assert!(error.starts_with("reading routing trace /no/such/trace.safetensors: "), "{error}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn devices_directories_and_huge_files_are_refused() {
        for path in ["/dev/zero", "/"] {
            let error = RoutingTrace::read(Path::new(path)).unwrap_err();
            assert!(matches!(&error, Error::Caller(CallerError::Trace { .. })), "{error}");
            assert!(error.to_string().contains("is not a regular file"), "{error}");
        }
        // A sparse file of 2 GiB takes no space on the disk.
        let path = std::env::temp_dir().join(format!("hybrid-ep-huge-{}", std::process::id()));
        File::create(&path).and_then(|file| file.set_len(2 << 30)).unwrap();
        let error = RoutingTrace::read(&path).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(error.contains("has more than 1073741824 bytes"), "{error}");
    }
}
