//! What is trained: the sizes of a mixture-of-experts layer, and how many tokens go through it.

use serde::{Deserialize, Serialize};

use crate::error::{PlanError, Result, at_least_one, not_negative};
use crate::routing::{ExpertShares, Routing};
use crate::units::{Bytes, Flop};

/// A model as people write it down; [`Model`] is the checked form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelDescription {
    /// Its name, for reports.
    pub name: String,
    /// Width of a token, elements.
    pub hidden: usize,
    /// Inner width of an expert, elements.
    pub expert_intermediate: usize,
    /// Matrices of an expert: 3 when it is gated (SwiGLU), 2 when it is not.
    #[serde(default = "gated")]
    pub expert_matrices: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Experts that a token chooses.
    pub topk: usize,
    /// Experts that every token uses, beside the routed ones. They stay at home: their compute precedes the
    /// experts'.
    #[serde(default)]
    pub shared_experts: usize,
    /// Layers that have experts.
    pub moe_layers: usize,
    /// Tokens of one GPU in one micro-batch.
    pub tokens_per_gpu: usize,
    /// Tokens that attend to each other: the sequence length.
    pub context: usize,
    /// Attention of a layer.
    #[serde(default)]
    pub attention: AttentionDescription,
    /// Types of what is stored and sent.
    #[serde(default)]
    pub precision: PrecisionDescription,
    /// How tokens spread over experts.
    #[serde(default)]
    pub routing: Routing,
}

/// Attention of a layer, by what it costs.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionDescription {
    /// Parameters of the projections.
    pub parameters: f64,
    /// Heads x (width of a query-key product + width of a value): multiply-adds per pair of tokens.
    pub score_width: f64,
}

/// Types of what is stored and sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrecisionDescription {
    /// Experts' weights.
    pub weights: ElementType,
    /// Tokens on their way to experts.
    pub dispatch: ElementType,
    /// Experts' outputs on their way back.
    pub combine: ElementType,
    /// Gradients of migrated experts.
    pub gradients: ElementType,
}

/// The type of an element, by its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ElementType {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    #[default]
    Bf16,
    /// 1 byte, and an f32 scale per 128 elements.
    Fp8,
}

impl ElementType {
    /// Bytes per element, scales included.
    pub fn bytes(self) -> f64 {
        match self {
            Self::F32 => 4.0,
            Self::Bf16 => 2.0,
            Self::Fp8 => 1.0 + 4.0 / 128.0,
        }
    }
}

fn gated() -> usize {
    3
}

/// A model whose numbers make sense together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "ModelDescription", into = "ModelDescription")]
pub struct Model {
    description: ModelDescription,
    shares: ExpertShares,
}

impl TryFrom<ModelDescription> for Model {
    type Error = PlanError;

    fn try_from(description: ModelDescription) -> Result<Self> {
        let ModelDescription { hidden, expert_intermediate, expert_matrices, experts, topk, .. } =
            description;
        at_least_one("hidden (elements)", hidden)?;
        at_least_one("expert_intermediate (elements)", expert_intermediate)?;
        at_least_one("expert_matrices", expert_matrices)?;
        at_least_one("experts", experts)?;
        at_least_one("moe_layers", description.moe_layers)?;
        at_least_one("tokens_per_gpu", description.tokens_per_gpu)?;
        at_least_one("context (tokens)", description.context)?;
        not_negative("attention.parameters", description.attention.parameters)?;
        not_negative("attention.score_width", description.attention.score_width)?;
        if topk == 0 || topk > experts {
            return Err(PlanError::Topk { topk, experts });
        }
        let shares = description.routing.shares(experts)?;
        if let Routing::Histogram(_) = description.routing {
            let limit = 1.0 / topk as f64;
            let hot = shares.as_slice().iter().position(|&share| share > limit * (1.0 + 1e-9));
            if let Some(expert) = hot {
                return Err(PlanError::Histogram(format!(
                    "expert {expert} has {:.2}% of the selections; a token chooses {topk} distinct experts, so one \
                     expert has at most {:.2}%",
                    100.0 * shares.as_slice()[expert],
                    100.0 * limit
                )));
            }
        }
        Ok(Self { shares: shares.capped(topk), description })
    }
}

impl From<Model> for ModelDescription {
    fn from(model: Model) -> Self {
        model.description
    }
}

impl Model {
    /// The description it was made of.
    pub fn description(&self) -> &ModelDescription {
        &self.description
    }

    /// Each expert's share of all selections, none above `1/topk`.
    pub fn shares(&self) -> &ExpertShares {
        &self.shares
    }

    /// Tokens of one GPU in one micro-batch, as a factor.
    pub fn tokens(&self) -> f64 {
        self.description.tokens_per_gpu as f64
    }

    /// Parameters of one expert.
    pub fn expert_parameters(&self) -> f64 {
        let ModelDescription { hidden, expert_intermediate, expert_matrices, .. } = self.description;
        hidden as f64 * expert_intermediate as f64 * expert_matrices as f64
    }

    /// `P`: one expert's weights.
    pub fn expert_bytes(&self) -> Bytes {
        Bytes(self.expert_parameters() * self.description.precision.weights.bytes())
    }

    /// One expert's gradients.
    pub fn gradient_bytes(&self) -> Bytes {
        Bytes(self.expert_parameters() * self.description.precision.gradients.bytes())
    }

    /// One token on its way to an expert.
    pub fn dispatch_row_bytes(&self) -> Bytes {
        Bytes(self.description.hidden as f64 * self.description.precision.dispatch.bytes())
    }

    /// One token on its way back.
    pub fn combine_row_bytes(&self) -> Bytes {
        Bytes(self.description.hidden as f64 * self.description.precision.combine.bytes())
    }

    /// Arithmetic of one GPU's tokens before the routed experts, forward: two operations per parameter of the
    /// attention projections, the router and the shared experts, and causal attention (each token attends to half
    /// of its context on average, two operations per multiply-add).
    pub fn pre_expert_flop(&self) -> Flop {
        let ModelDescription { hidden, experts, shared_experts, context, attention, .. } = self.description;
        let router = hidden as f64 * experts as f64;
        let shared = shared_experts as f64 * self.expert_parameters();
        let scores = attention.score_width * context as f64;
        Flop(self.tokens() * (2.0 * (attention.parameters + router + shared) + scores))
    }

    /// Arithmetic of the routed experts for as many tokens as one GPU has, forward: the average over all GPUs.
    pub fn expert_flop(&self) -> Flop {
        Flop(self.tokens() * self.description.topk as f64 * 2.0 * self.expert_parameters())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn the_sizes_of_a_deepseek_v3_layer() {
        let model = Model::try_from(presets::deepseek_v3()).unwrap();
        assert_eq!(model.expert_parameters(), 44_040_192.0);
        assert_eq!(model.expert_bytes(), Bytes(88_080_384.0));
        assert_eq!(model.dispatch_row_bytes(), Bytes(14_336.0));
        assert_eq!(model.expert_flop(), Flop(4096.0 * 8.0 * 2.0 * 44_040_192.0));
    }

    #[test]
    fn impossible_models_say_what_would_be_possible() {
        let with = |change: fn(&mut ModelDescription)| {
            let mut description = presets::mixtral_8x7b();
            change(&mut description);
            Model::try_from(description).unwrap_err().to_string()
        };
        assert!(with(|model| model.topk = 9).contains("at least 1 and at most 8"));
        assert!(with(|model| model.hidden = 0).contains("hidden (elements) is 0: it must be at least one"));
        assert!(with(|model| model.tokens_per_gpu = 0).contains("tokens_per_gpu"));
        let skewed = with(|model| model.routing = Routing::Histogram(vec![93.0, 1., 1., 1., 1., 1., 1., 1.]));
        assert!(
            skewed.contains("expert 0 has 93.00% of the selections") && skewed.contains("at most 50.00%")
        );
    }

    #[test]
    fn a_model_is_read_checked_and_written_back() {
        let text = r#"{"name": "tiny", "hidden": 8, "expert_intermediate": 4, "experts": 4, "topk": 2, "moe_layers": 1,
            "tokens_per_gpu": 16, "context": 16, "precision": {"dispatch": "fp8"}}"#;
        let model: Model = serde_json::from_str(text).unwrap();
        assert_eq!(model.expert_parameters(), 96.0);
        assert_eq!(model.dispatch_row_bytes(), Bytes(8.25));
        assert_eq!(model.combine_row_bytes(), Bytes(16.0));
        let again: Model = serde_json::from_str(&serde_json::to_string(&model).unwrap()).unwrap();
        assert_eq!(again, model);
        let error = serde_json::from_str::<Model>(&text.replace(r#""topk": 2"#, r#""topk": 5"#)).unwrap_err();
        assert!(error.to_string().contains("top-5 of 4 experts"));
    }
}
