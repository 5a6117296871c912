//! The model: the sizes of a mixture-of-experts layer, and the number of tokens that pass through it.

use serde::{Deserialize, Serialize};

use crate::error::{PlanError, Result, count, number};
use crate::limits;
use crate::routing::{ExpertShares, Routing};
use crate::units::{Bytes, Flop};

/// An unchecked description of a model; [`Model`] is the checked form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelDescription {
    /// Name of the model, for reports.
    pub name: String,
    /// `H`: width of a token, elements.
    pub hidden: usize,
    /// Inner width of an expert, elements.
    pub expert_intermediate: usize,
    /// Matrices of an expert: 3 for gated experts (SwiGLU), 2 otherwise.
    #[serde(default = "gated")]
    pub expert_matrices: usize,
    /// `E`: routed experts of a layer.
    pub experts: usize,
    /// `K`: routed experts that a token chooses.
    pub topk: usize,
    /// Experts that every token uses in addition to the routed ones. They do not migrate. Their compute counts as
    /// compute before the routed experts.
    #[serde(default)]
    pub shared_experts: usize,
    /// Layers that have experts.
    pub moe_layers: usize,
    /// `T`: tokens of one GPU in one micro-batch.
    pub tokens_per_gpu: usize,
    /// Sequence length, tokens.
    pub context: usize,
    /// `N`: tokens of an optimizer step, over all GPUs. Without it, the options' micro-batches define the step.
    #[serde(default)]
    pub global_batch: Option<usize>,
    /// Parameters outside the layers with experts: embeddings and dense layers. They count for memory and for the
    /// exchange of gradients, not for compute.
    #[serde(default)]
    pub other_parameters: f64,
    /// Sizes of the attention of a layer.
    #[serde(default)]
    pub attention: AttentionDescription,
    /// Element types of weights, tokens and gradients.
    #[serde(default)]
    pub precision: PrecisionDescription,
    /// Distribution of the tokens over the experts.
    #[serde(default)]
    pub routing: Routing,
}

/// The sizes of the attention of a layer that determine its compute.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionDescription {
    /// Parameters of the projections of a layer.
    pub parameters: f64,
    /// Multiply-adds per pair of tokens: heads x (query-key width + value width).
    pub score_width: f64,
}

/// Element types of weights, tokens and gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrecisionDescription {
    /// Weights of experts.
    pub weights: ElementType,
    /// Tokens in dispatch.
    pub dispatch: ElementType,
    /// Expert outputs in combine.
    pub combine: ElementType,
    /// Gradients of migrated experts.
    pub gradients: ElementType,
}

/// An element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ElementType {
    /// 4 bytes per element.
    F32,
    /// 2 bytes per element.
    #[default]
    Bf16,
    /// 1 byte per element, and one f32 scale per 128 elements.
    Fp8,
}

impl ElementType {
    /// Bytes per element, including scales.
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

/// A checked model. Every number is inside its bounds of [`limits`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "ModelDescription", into = "ModelDescription")]
pub struct Model {
    description: ModelDescription,
    shares: ExpertShares,
    tokens: f64,
}

impl TryFrom<ModelDescription> for Model {
    type Error = PlanError;

    fn try_from(description: ModelDescription) -> Result<Self> {
        let ModelDescription { hidden, expert_intermediate, expert_matrices, experts, topk, .. } =
            description;
        count("hidden (elements)", hidden, limits::WIDTH)?;
        count("expert_intermediate (elements)", expert_intermediate, limits::WIDTH)?;
        count("expert_matrices", expert_matrices, limits::MATRICES)?;
        count("experts", experts, limits::EXPERTS)?;
        count("shared_experts", description.shared_experts, limits::SHARED_EXPERTS)?;
        count("moe_layers", description.moe_layers, limits::LAYERS)?;
        count("tokens_per_gpu", description.tokens_per_gpu, limits::TOKENS)?;
        count("context (tokens)", description.context, limits::TOKENS)?;
        if let Some(batch) = description.global_batch {
            count("global_batch (tokens)", batch, limits::GLOBAL_BATCH)?;
        }
        number("other_parameters", description.other_parameters, limits::OTHER_PARAMETERS)?;
        number("attention.parameters", description.attention.parameters, limits::ATTENTION_PARAMETERS)?;
        number("attention.score_width", description.attention.score_width, limits::SCORE_WIDTH)?;
        if topk > 0 && topk <= experts {
            count("topk", topk, limits::TOPK)?;
        }
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
        let tokens = description.tokens_per_gpu as f64;
        Ok(Self { shares: shares.capped(topk), description, tokens })
    }
}

impl From<Model> for ModelDescription {
    fn from(model: Model) -> Self {
        model.description
    }
}

impl Model {
    /// The description of the model.
    pub fn description(&self) -> &ModelDescription {
        &self.description
    }

    /// Each slot's fraction of all selections; no fraction exceeds `1/topk`. A slot holds an expert or, after
    /// [`Model::spread`], a copy of one.
    pub fn shares(&self) -> &ExpertShares {
        &self.shares
    }

    /// Experts and copies of experts of a layer: the number of experts, unless [`Model::spread`] added copies.
    pub fn slots(&self) -> usize {
        self.shares.as_slice().len()
    }

    /// The model with its number of slots rounded up to a multiple of `gpus`. Slots beyond the number of experts hold
    /// copies: each further slot gets a copy of the expert with the highest share per copy. The copies of an expert
    /// divide its share.
    ///
    /// # Errors
    /// [`PlanError::Count`] when `gpus` is 0 or above the largest number of experts ([`limits::EXPERTS`]).
    pub fn spread(&self, gpus: usize) -> Result<Self> {
        count("number of GPUs of one EP group", gpus, limits::EXPERTS)?;
        let slots = self.description.experts.div_ceil(gpus) * gpus;
        Ok(Self { shares: self.shares.with_copies(slots), ..self.clone() })
    }

    /// The same model with a different number of tokens per GPU and micro-batch. It may be a mean, so it need not be whole.
    #[must_use]
    pub fn with_tokens(&self, tokens: f64) -> Self {
        Self { tokens, ..self.clone() }
    }

    /// `T`: tokens of one GPU in one micro-batch, as a number for formulas. It need not be whole.
    pub fn tokens(&self) -> f64 {
        self.tokens
    }

    /// `a`: parameters of a layer besides its routed experts: attention, router and shared experts.
    pub fn dense_parameters(&self) -> f64 {
        let ModelDescription { hidden, experts, shared_experts, attention, .. } = self.description;
        attention.parameters
            + hidden as f64 * experts as f64
            + shared_experts as f64 * self.expert_parameters()
    }

    /// All parameters of the model, each counted once.
    pub fn parameters(&self) -> f64 {
        let experts = self.description.experts as f64 * self.expert_parameters();
        self.description.moe_layers as f64 * (experts + self.dense_parameters())
            + self.description.other_parameters
    }

    /// Parameters of one expert: `hidden * expert_intermediate * expert_matrices`.
    pub fn expert_parameters(&self) -> f64 {
        let ModelDescription { hidden, expert_intermediate, expert_matrices, .. } = self.description;
        hidden as f64 * expert_intermediate as f64 * expert_matrices as f64
    }

    /// `P`: bytes of one expert's weights.
    pub fn expert_bytes(&self) -> Bytes {
        Bytes(self.expert_parameters() * self.description.precision.weights.bytes())
    }

    /// Bytes of one expert's gradients.
    pub fn gradient_bytes(&self) -> Bytes {
        Bytes(self.expert_parameters() * self.description.precision.gradients.bytes())
    }

    /// Bytes of one token in dispatch.
    pub fn dispatch_row_bytes(&self) -> Bytes {
        Bytes(self.description.hidden as f64 * self.description.precision.dispatch.bytes())
    }

    /// Bytes of one expert output in combine.
    pub fn combine_row_bytes(&self) -> Bytes {
        Bytes(self.description.hidden as f64 * self.description.precision.combine.bytes())
    }

    /// Operations of a forward pass before the routed experts, for the tokens of one GPU:
    /// `T (2 (attention parameters + H E + shared experts * expert parameters) + score_width * context)`.
    ///
    /// Attention projections, router and shared experts take two operations per parameter. Causal attention takes two
    /// operations per multiply-add, and each token attends to half of the context on average.
    pub fn pre_expert_flop(&self) -> Flop {
        let ModelDescription { hidden, experts, shared_experts, context, attention, .. } = self.description;
        let router = hidden as f64 * experts as f64;
        let shared = shared_experts as f64 * self.expert_parameters();
        let scores = attention.score_width * context as f64;
        Flop(self.tokens() * (2.0 * (attention.parameters + router + shared) + scores))
    }

    /// Operations of the routed experts per GPU in a forward pass, as the mean over all GPUs: `T K 2 * expert parameters`.
    pub fn expert_flop(&self) -> Flop {
        Flop(self.tokens() * self.description.topk as f64 * 2.0 * self.expert_parameters())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn a_deepseek_v3_layer_has_the_published_sizes() {
        let model = Model::try_from(presets::deepseek_v3()).unwrap();
        assert_eq!(model.expert_parameters(), 44_040_192.0);
        assert_eq!(model.expert_bytes(), Bytes(88_080_384.0));
        assert_eq!(model.dispatch_row_bytes(), Bytes(14_336.0));
        assert_eq!(model.expert_flop(), Flop(4096.0 * 8.0 * 2.0 * 44_040_192.0));
    }

    #[test]
    fn errors_of_impossible_models_name_the_possible_values() {
        let with = |change: fn(&mut ModelDescription)| {
            let mut description = presets::mixtral_8x7b();
            change(&mut description);
            Model::try_from(description).unwrap_err().to_string()
        };
        assert!(with(|model| model.topk = 9).contains("at least 1 and at most 8"));
        let many = with(|model| (model.experts, model.topk) = (limits::TOPK.most + 2, limits::TOPK.most + 1));
        assert!(many.contains("topk is") && many.contains(&format!("to {}", limits::TOPK.most)), "{many}");
        assert!(
            with(|model| model.hidden = 0)
                .contains("hidden (elements) is 0: it must be a whole number from 1 to 1048576")
        );
        assert!(with(|model| model.tokens_per_gpu = 0).contains("tokens_per_gpu"));
        let skewed = with(|model| model.routing = Routing::Histogram(vec![93.0, 1., 1., 1., 1., 1., 1., 1.]));
        assert!(
            skewed.contains("expert 0 has 93.00% of the selections") && skewed.contains("at most 50.00%")
        );
    }

    #[test]
    fn copies_are_refused_for_an_impossible_number_of_gpus() {
        let model = Model::try_from(presets::mixtral_8x7b()).unwrap();
        assert_eq!([1, 3, 16].map(|gpus| model.spread(gpus).unwrap().slots()), [8, 9, 16]);
        for gpus in [0, 1 << 40] {
            let error = model.spread(gpus).unwrap_err().to_string();
            assert!(
                error.contains("number of GPUs of one EP group") && error.contains("1 to 65536"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_model_survives_json_and_is_checked_when_read() {
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
