//! Handles of routings in the backend's memory ([`Backend::preprocess_on_device`](crate::Backend::preprocess_on_device)).

use super::case::Form;
use super::check::{Check, given};
use super::failure::{Failure, Unit};
use crate::backend::DispatchMode;
use crate::device::{DeviceReport, DeviceRouting, Indices};
use crate::routing::Routing;
use crate::weight::WeightRows;

const OPERATOR: &str = "preprocess_on_device";

impl<B: WeightRows> Check<'_, B> {
    /// Makes the handle of the case's routing from its lists in memory, and checks the report.
    pub(super) fn preprocess_on_device(&mut self, form: Form) -> Result<B::Handle, Failure> {
        let (mode, at) = (self.prepared.case.mode, self.rank.index());
        let (routing, shape) = (&self.prepared.routings[at], &self.prepared.received[at].shape);
        let (tokens, k) =
            (routing.tokens(), routing.rows().map(|(experts, _)| experts.len()).max().unwrap_or(0));
        let (indices, topk_weights) = topk(routing, k);
        let weights = match form {
            Form::Narrow | Form::Wide => topk_weights,
            Form::Map => routing.dense_probs(),
        };
        let lists: Vec<u8> = match form {
            Form::Narrow => indices.iter().flat_map(|&index| (index as i32).to_ne_bytes()).collect(),
            Form::Wide => indices.iter().flat_map(|&index| index.to_ne_bytes()).collect(),
            Form::Map => map(routing),
        };
        let (lists, weights) = (self.input(&lists)?, self.input(bytemuck::cast_slice(&weights))?);
        let weights = Some(&weights);
        let routing = match form {
            Form::Narrow => DeviceRouting::TopK { tokens, k, indices: Indices::Narrow(&lists), weights },
            Form::Wide => DeviceRouting::TopK { tokens, k, indices: Indices::Wide(&lists), weights },
            // A map without choices needs an upper bound above 0 too.
            Form::Map => DeviceRouting::Map { tokens, most: k.max(1), map: &lists, probs: weights },
        };

        let padded: Vec<i64> = shape.tokens_per_expert.iter().map(|&count| count.into()).collect();
        let kept: Vec<i64> = shape.kept_per_expert.iter().map(|&count| count.into()).collect();
        let overflow = [i32::from(shape.overflow())];
        let outputs =
            [bytemuck::cast_slice(&padded), bytemuck::cast_slice(&kept), bytemuck::cast_slice(&overflow)];
        let expected = [
            given("tokens per expert", Unit::Byte, size_of::<i64>(), outputs[0]),
            given("kept tokens per expert", Unit::Byte, size_of::<i64>(), outputs[1]),
            given("overflow", Unit::Byte, size_of::<i32>(), outputs[2]),
        ];
        let [mut padded, mut kept, mut overflow] =
            [self.output(expected[0])?, self.output(expected[1])?, self.output(expected[2])?];
        let mut report = DeviceReport::default().overflow(&mut overflow);
        if mode != DispatchMode::Plain {
            report = report.tokens_per_expert(&mut padded).kept_per_expert(&mut kept);
        }
        let handle = self.backend.preprocess_on_device(&routing, mode, self.prepared.capacity[at], report);
        let handle = handle.map_err(|error| self.error(OPERATOR, error))?;
        self.shape_is(&handle, tokens, shape)?;
        for (expected, memory) in expected.into_iter().zip([&padded, &kept, &overflow]) {
            self.verify(OPERATOR, expected, memory)?;
        }
        Ok(handle)
    }
}

/// The lists of a top-k router, `[tokens, k]`. Index -1 marks an unused entry; its weight must not matter.
fn topk(routing: &Routing, k: usize) -> (Vec<i64>, Vec<f32>) {
    let cells = routing.tokens() * k;
    let (mut indices, mut weights) = (vec![-1; cells], vec![7.0; cells]);
    for (token, (experts, given)) in routing.rows().enumerate() {
        // Routers give experts in any order.
        for (at, (&expert, &weight)) in (token * k..).zip(experts.iter().zip(given).rev()) {
            (indices[at], weights[at]) = (expert.into(), weight);
        }
    }
    (indices, weights)
}

/// The multi-hot map, `[tokens, experts]`.
fn map(routing: &Routing) -> Vec<u8> {
    let mut map = vec![0; routing.tokens() * routing.experts()];
    for (token, (experts, _)) in routing.rows().enumerate() {
        experts.iter().for_each(|&expert| map[token * routing.experts() + expert as usize] = 1);
    }
    map
}
