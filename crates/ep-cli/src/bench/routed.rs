//! A router's lists, and the routing that each backend's preprocess is measured with.

use ep::{Backend, DeviceReport, DeviceRouting, DispatchMode, Indices, Routing};

use crate::common::backend::BackendKind;

/// A rank's routing in the form that preprocess takes.
#[derive(Debug)]
pub(super) enum Routed<M> {
    /// Checked on the host.
    Checked(Routing),
    /// The lists in the backend's memory.
    OnDevice {
        tokens: usize,
        k: usize,
        /// i32 `[tokens, k]`.
        indices: M,
        /// f32 `[tokens, k]`.
        weights: M,
    },
}

impl<M> Routed<M> {
    /// Hands the lists to the backend, as a caller of that kind of backend does.
    pub(super) fn new<B: Backend<Memory = M>>(
        backend: &mut B,
        kind: BackendKind,
        lists: &TopK,
    ) -> ep::Result<Self> {
        let TopK { tokens, experts, k, indices, weights } = lists;
        if kind == BackendKind::Host {
            return Ok(Self::Checked(Routing::from_topk(backend.rank(), *experts, *k, indices, weights)?));
        }
        let mut place = |bytes: Vec<u8>| -> ep::Result<M> {
            let mut memory = backend.alloc(bytes.len())?;
            backend.upload(&bytes, &mut memory)?;
            Ok(memory)
        };
        Ok(Self::OnDevice {
            tokens: *tokens,
            k: *k,
            indices: place(indices.iter().flat_map(|index| index.to_le_bytes()).collect())?,
            weights: place(weights.iter().flat_map(|weight| weight.to_le_bytes()).collect())?,
        })
    }

    pub(super) fn preprocess<B: Backend<Memory = M>>(
        &self,
        backend: &mut B,
        mode: DispatchMode,
        capacity: Option<usize>,
    ) -> ep::Result<B::Handle> {
        match self {
            Self::Checked(routing) => backend.preprocess(routing, mode, capacity),
            Self::OnDevice { tokens, k, indices, weights } => {
                let (tokens, k, indices) = (*tokens, *k, Indices::Narrow(indices));
                let routing = DeviceRouting::TopK { tokens, k, indices, weights: Some(weights) };
                backend.preprocess_on_device(&routing, mode, capacity, DeviceReport::default())
            }
        }
    }
}

/// A router's lists of shape `[tokens, k]`. Index -1 marks an unused entry.
#[derive(Debug)]
pub(super) struct TopK {
    pub(super) tokens: usize,
    pub(super) experts: usize,
    pub(super) k: usize,
    pub(super) indices: Vec<i32>,
    pub(super) weights: Vec<f32>,
}

impl TopK {
    /// The lists of this routing. Each row has its largest weight first, as routers give them.
    pub(super) fn of(routing: &Routing, k: usize) -> Self {
        let (tokens, experts) = (routing.tokens(), routing.experts());
        let cells = tokens * k;
        let (mut indices, mut weights) = (vec![-1; cells], vec![0.0; cells]);
        let mut row: Vec<(f32, u32)> = Vec::with_capacity(k);
        for token in 0..tokens {
            row.clear();
            row.extend(
                routing.weights_of(token).iter().copied().zip(routing.experts_of(token).iter().copied()),
            );
            row.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            for (at, &(weight, expert)) in (token * k..).zip(&row) {
                indices[at] = expert as i32;
                weights[at] = weight;
            }
        }
        Self { tokens, experts, k, indices, weights }
    }
}

#[cfg(test)]
mod tests {
    use ep::Rank;

    use super::*;

    #[test]
    fn lists_give_back_the_routing_they_were_made_from() {
        let weights = [0.1, 0.7, 0.0, 0.2, 0.5, 0.5];
        let routing = Routing::from_topk(Rank(0), 8, 3, &[7, 1, -1, 0, 3, 2], &weights).unwrap();
        let lists = TopK::of(&routing, 3);
        assert_eq!(lists.indices, [1, 7, -1, 2, 3, 0]);
        let again = Routing::from_topk(Rank(0), 8, lists.k, &lists.indices, &lists.weights).unwrap();
        assert_eq!(again, routing);
    }
}
