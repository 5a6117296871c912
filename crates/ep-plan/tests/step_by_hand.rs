//! Computes the formulas of `docs/step-model.md` and of `NOTES.md` again, without the planner's code, and compares every
//! price and every choice of the step planner with them, on random problems with even routing.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use ep_plan::planner::Batch;
use ep_plan::step::{StepPlanner, StepPrice, Strategy as Way};
use ep_plan::{Cluster, Model, Options, presets};
use proptest::prelude::*;

/// A level: members, GPUs that share a link, bytes per second, start of a message, round trip.
#[derive(Debug, Clone, Copy)]
struct Link {
    members: usize,
    share: f64,
    rate: f64,
    alpha: f64,
    round_trip: f64,
}

impl Link {
    fn exchange(&self, messages: f64, bytes: f64, round_trips: f64) -> f64 {
        if messages == 0.0 {
            return 0.0;
        }
        messages * self.alpha + round_trips * self.round_trip + bytes * self.share / self.rate
    }
}

#[derive(Debug)]
struct Problem {
    links: Vec<Link>,
    model: Model,
    options: Options,
    batch: f64,
    throughput: f64,
    hbm: f64,
    device: f64,
}

/// `p_0`, `p_in`, `t`, `SF'` and `e` of a layout.
#[derive(Clone, Debug)]
struct Shape {
    across: usize,
    inside: usize,
    tensor: usize,
    stage: Vec<usize>,
    group: Vec<usize>,
}

fn product(factors: &[usize]) -> f64 {
    factors.iter().map(|&factor| factor as f64).product()
}

fn divisors(number: usize) -> impl Iterator<Item = usize> {
    (1..=number).filter(move |divisor| number.is_multiple_of(*divisor))
}

/// Every vector of divisors.
fn choices(members: &[usize]) -> Vec<Vec<usize>> {
    members.iter().fold(vec![vec![]], |all, &count| {
        all.iter().flat_map(|head| divisors(count).map(move |d| [&head[..], &[d]].concat())).collect()
    })
}

/// Whether the choice is a run: inner levels whole, then one level in part, then ones.
fn is_run(choice: &[usize], members: &[usize]) -> bool {
    let outer = choice.iter().position(|&count| count > 1).unwrap_or(choice.len());
    (outer + 1..choice.len()).all(|level| choice[level] == members[level])
}

fn chain(a: f64, e: f64, chunks: f64) -> f64 {
    a.max(e) + a.min(e) / chunks
}

impl Problem {
    fn layers(&self, shape: &Shape) -> f64 {
        let stages = shape.across * shape.inside;
        self.model.description().moe_layers.div_ceil(stages) as f64
    }

    fn compressions(&self, way: Way) -> (f64, f64) {
        match way {
            Way::ExpertDomains => (self.options.weight_compression, self.options.gradient_compression),
            _ => (1.0, 1.0),
        }
    }

    /// Memory of experts and of dense parameters.
    fn state(&self, way: Way, shape: &Shape) -> (f64, f64) {
        let d = self.model.description();
        let (bw, bg) = (d.precision.weights.bytes(), d.precision.gradients.bytes());
        let p = self.model.expert_parameters();
        let slots = d.experts as f64 / product(&shape.group);
        let copies = product(&shape.stage) / product(&shape.group);
        let shared = if self.compressions(way).0 > 1.0 { p * bw } else { 0.0 };
        let experts = self.layers(shape) * (slots * p * (bw + bg + 12.0 / copies) + shared);
        let replicas = product(&shape.stage) / shape.tensor as f64;
        (experts, self.dense(shape) * (bw + bg + 12.0 / replicas))
    }

    fn dense(&self, shape: &Shape) -> f64 {
        let d = self.model.description();
        let a = d.attention.parameters
            + (d.hidden * d.experts) as f64
            + d.shared_experts as f64 * self.model.expert_parameters();
        let stages = (shape.across * shape.inside) as f64;
        (self.layers(shape) * a + d.other_parameters / stages) / shape.tensor as f64
    }

    /// 0 if it fits, 1 if it is tight, with the memory for gathered experts.
    fn fit(&self, way: Way, shape: &Shape) -> Option<(u8, f64)> {
        let (experts, dense) = self.state(way, shape);
        let reserve = self.options.reserved_memory * self.device;
        if experts <= self.device - reserve && dense <= reserve {
            return Some((0, self.device - reserve - experts));
        }
        let left = self.device - experts - dense;
        (left >= 0.0).then_some((1, left))
    }

    /// Forward and backward of a layer with these domain sizes. `None` if the gathered experts do not fit.
    fn layer(&self, way: Way, shape: &Shape, sizes: &[usize], kept: bool) -> Option<f64> {
        let d = self.model.description();
        let o = &self.options;
        let (bw, bg) = (d.precision.weights.bytes(), d.precision.gradients.bytes());
        let (crw, crg) = self.compressions(way);
        let p = self.model.expert_parameters();
        let (h, k) = (d.hidden as f64, d.topk as f64);
        let m = self.micro_batches(shape) as f64;
        let t = self.batch / (product(&shape.stage) * m);
        let n = d.experts as f64 / product(&shape.group);
        let domains: Vec<usize> = shape.group.iter().zip(sizes).map(|(e, s)| e / s).collect();
        let gathered = n * (product(sizes) - 1.0);
        let live = if kept { self.layers(shape) } else { self.layers(shape).min(o.live_layers as f64) };
        if gathered * p * (bw + bw.max(bg)) * live > self.fit(way, shape)?.1 {
            return None;
        }
        let (mut ag, mut a2a, mut rs, mut ar) = (0.0, 0.0, 0.0, 0.0);
        for (l, link) in self.links.iter().enumerate() {
            let outer = product(&domains[..l]);
            let others = (domains[l] - 1) as f64;
            let groups = outer * domains[l] as f64;
            let in_group = (d.experts as f64 / groups) as usize;
            let avoided: f64 = (0..d.topk)
                .map(|i| ((d.experts - in_group) as f64 - i as f64).max(0.0) / (d.experts - i) as f64)
                .product();
            let (rows, messages) = match way {
                Way::PlainEp => (others * k / groups, others * product(&domains[l + 1..])),
                _ => (outer * others * (1.0 - avoided), others),
            };
            for width in [d.precision.dispatch.bytes(), d.precision.combine.bytes()] {
                a2a += link.exchange(messages, t * rows * h * width, 1.0);
            }
            let peers = (sizes[l] - 1) as f64;
            let moved = n * product(&sizes[..l]) * peers * p;
            ag += link.exchange(peers, moved * bw / crw, 1.0);
            rs += link.exchange(peers, moved * bg / crg, 1.0);
            let e = shape.group[l] as f64;
            ar += link.exchange(2.0 * (e - 1.0), 2.0 * p * bw * (e - 1.0) / product(&shape.group[l..]), 2.0);
        }
        let codec = crw > 1.0 && product(sizes) > 1.0;
        let on = |condition: bool, time: f64| if condition { time } else { 0.0 };
        let pe = self.model.with_tokens(t).pre_expert_flop().0 / self.throughput;
        let e = t * k * 2.0 * p / self.throughput;
        let dec = on(codec, 2.0 * gathered * p * bw / self.hbm);
        let enc = on(codec, 5.0 * n * p * bw / self.hbm);
        let codec_g = on(crg > 1.0, 7.0 * gathered * p * bg / self.hbm);
        let refresh = on(codec, ar / o.shared_refresh_steps as f64);
        let chunks = o.overlap_chunks as f64;
        let forward = |gather: bool| {
            let (ag, dec) = (on(gather, ag), on(gather, dec));
            (pe + chain(a2a, e + dec, chunks)).max(ag + a2a)
        };
        let backward = |gather: bool, reduce: bool, last: bool| {
            let gpu = 2.0 * e + on(gather, dec) + on(reduce, codec_g) + on(last, enc);
            let links = on(gather, ag) + on(reduce, rs) + on(last, refresh) + a2a;
            (2.0 * pe + chain(a2a, gpu, chunks)).max(links)
        };
        let total = match kept {
            true => {
                forward(true)
                    + (m - 1.0) * (forward(false) + backward(false, false, false))
                    + backward(false, true, true)
            }
            false => m * forward(true) + (m - 1.0) * backward(true, true, false) + backward(true, true, true),
        };
        Some(total / m)
    }

    fn micro_batches(&self, shape: &Shape) -> usize {
        let most = self.model.description().tokens_per_gpu as f64;
        (self.batch / (product(&shape.stage) * most)).ceil().max(1.0) as usize
    }

    /// The best layer of a shape.
    fn best_layer(&self, way: Way, shape: &Shape) -> Option<f64> {
        let all = choices(&shape.group);
        let sizes = match way {
            Way::HierarchicalEp | Way::PlainEp => vec![vec![1; shape.group.len()]],
            _ => all,
        };
        let layers = sizes.iter().flat_map(|sizes| {
            [false, true].into_iter().filter_map(|kept| self.layer(way, shape, sizes, kept))
        });
        layers.reduce(f64::min)
    }

    fn sync(&self, first: usize, bytes: f64, copies: &[usize]) -> f64 {
        (first..copies.len())
            .map(|l| {
                let others = copies[l] as f64 - 1.0;
                self.links[l].exchange(2.0 * others, bytes * others / product(&copies[l..]), 2.0)
            })
            .sum()
    }

    fn step(&self, way: Way, shape: &Shape) -> Option<f64> {
        let d = self.model.description();
        let (bw, bg) = (d.precision.weights.bytes(), d.precision.gradients.bytes());
        let m = self.micro_batches(shape) as f64;
        let t = self.batch / (product(&shape.stage) * m);
        let row = d.hidden as f64 * d.precision.combine.bytes();
        let parallel = shape.tensor as f64;
        let extra =
            2.0 * self.links[self.links.len() - 1].exchange(parallel - 1.0, (parallel - 1.0) * t * row, 1.0);
        let tau = self.layers(shape) * (self.best_layer(way, shape)? + 2.0 * extra);
        let stages = shape.across * shape.inside;
        let mut crossings = Vec::new();
        for stage in 1..stages {
            let link = self.links[if stage % shape.inside == 0 { 0 } else { 1 }];
            let senders = link.share.min(product(&shape.stage[1..]));
            crossings.push((link.alpha + t * row * senders / link.rate, link.round_trip / 2.0));
        }
        let slowest = crossings.iter().fold(tau, |slowest, (x, _)| slowest.max(*x));
        let passes = stages as f64 * tau
            + (m - 1.0) * slowest
            + crossings.iter().map(|(x, wait)| 2.0 * (x + wait)).sum::<f64>();
        let experts =
            self.layers(shape) * d.experts as f64 / product(&shape.group) * self.model.expert_parameters();
        let copies: Vec<usize> = shape.stage.iter().zip(&shape.group).map(|(s, e)| s / e).collect();
        let mut dense_copies = shape.stage.clone();
        *dense_copies.last_mut().unwrap() /= shape.tensor;
        let exchanges: f64 = [(self.dense(shape), 4.0 + bw, &dense_copies), (experts, bg + bw, &copies)]
            .iter()
            .map(|&(parameters, bytes, copies)| match way {
                Way::LocalSteps => {
                    let whole = self.sync(0, parameters * 2.0 * bw, copies);
                    let rare = whole - self.sync(1, parameters * 2.0 * bw, copies);
                    self.sync(1, parameters * bytes, copies) + rare / self.options.local_steps as f64
                }
                _ => self.sync(0, parameters * bytes, copies),
            })
            .sum();
        Some(passes + exchanges)
    }

    /// The fastest shape of a strategy: those that fit before those that are tight, then by time.
    fn fastest(&self, way: Way) -> Option<(u8, f64)> {
        let members: Vec<usize> = self.links.iter().map(|link| link.members).collect();
        let mut best: Option<(u8, f64)> = None;
        for stage in choices(&members) {
            let parts: Vec<usize> = members.iter().zip(&stage).map(|(all, kept)| all / kept).collect();
            let (across, inside) = (parts[0], parts[1..].iter().product::<usize>());
            // A level is divided only when every level outside it, below the outermost, is divided completely.
            let in_order =
                (2..parts.len()).all(|level| parts[level] == 1 || (1..level).all(|outer| stage[outer] == 1));
            let pipeline = way == Way::Pipeline;
            if !in_order || (across > 1) != pipeline || (across > 1 && across < members[0] && inside > 1) {
                continue;
            }
            if across * inside > self.model.description().moe_layers {
                continue;
            }
            let spans = matches!(way, Way::ExpertDomains | Way::HierarchicalEp | Way::PlainEp);
            for group in choices(&stage) {
                let gpus: usize = group.iter().product();
                let fits = gpus <= self.model.description().experts.max(group[0]);
                if (!pipeline && (group[0] > 1) != spans) || !is_run(&group[1..], &stage[1..]) || !fits {
                    continue;
                }
                // The least tensor parallelism that fits, else the least that is tight.
                let shapes: Vec<Shape> = divisors(stage[stage.len() - 1])
                    .map(|tensor| Shape {
                        across,
                        inside,
                        tensor,
                        stage: stage.clone(),
                        group: group.clone(),
                    })
                    .collect();
                let rank = |shape: &&Shape| self.fit(way, shape).map_or(2, |(fit, _)| fit);
                let shape = shapes.iter().min_by_key(rank).unwrap();
                let Some((fit, _)) = self.fit(way, shape) else { continue };
                let Some(step) = self.step(way, shape) else { continue };
                if best.is_none_or(|old| (fit, step) < old) {
                    best = Some((fit, step));
                }
            }
        }
        best
    }
}

fn any_problem() -> impl Strategy<Value = (Cluster, Model, Options, Problem)> {
    let counts = (prop::sample::select(vec![2usize, 4]), prop::sample::select(vec![1usize, 2, 4]));
    let links = prop::collection::vec((-1.0..3.0f64, 0.0..1e-4f64, 0.0..0.1f64, any::<bool>()), 3);
    let sizes = (8..12u32, 8..12u32, 1..=4usize, 8..13u32, 1..=12usize, 0.5..40.0f64);
    let options = (
        prop::sample::select(vec![1.0, 50.0]),
        prop::sample::select(vec![1.0, 10.0]),
        prop::option::of(1usize..200_000_000),
        1usize..5,
        0.1..0.5f64,
        0.0..2e9f64,
    );
    (counts, links, sizes, options).prop_map(|((outer, inner), links, sizes, options)| {
        let mut cluster = presets::datacenters(outer, 100.0, 0.0, presets::dgx_h100(inner));
        let (hidden, width, topk, tokens, layers, memory) = sizes;
        cluster.levels[2].scaling_factor = 4;
        cluster.gpu.memory_gb = memory;
        for (level, (decade, alpha, round_trip, shared)) in cluster.levels.iter_mut().zip(links) {
            level.bandwidth_gbit_per_s = 10f64.powf(decade);
            level.alpha_s = alpha;
            level.round_trip_s = round_trip;
            if shared {
                level.sharing = ep_plan::cluster::Sharing::PerMember;
            }
        }
        let (weights, gradients, batch, micro_batches, reserved_memory, other) = options;
        let mut model = presets::mixtral_8x7b();
        model.hidden = 1 << hidden;
        model.expert_intermediate = 1 << width;
        model.experts = 64;
        model.topk = topk;
        model.tokens_per_gpu = 1 << tokens;
        model.moe_layers = layers;
        model.shared_experts = topk % 2;
        model.global_batch = batch;
        model.other_parameters = other;
        let options = Options {
            weight_compression: weights,
            gradient_compression: gradients,
            micro_batches,
            batch: if batch.is_some() { Batch::Model } else { Batch::MicroBatches },
            reserved_memory,
            ..Options::default()
        };
        let (mut inside, mut described) = (1.0, Vec::new());
        for level in cluster.levels.iter().rev() {
            let per_member = level.sharing == ep_plan::cluster::Sharing::PerMember;
            described.push(Link {
                members: level.scaling_factor,
                share: if per_member { inside } else { 1.0 },
                rate: level.bandwidth_gbit_per_s * 1e9 / 8.0,
                alpha: level.alpha_s,
                round_trip: level.round_trip_s,
            });
            inside *= level.scaling_factor as f64;
        }
        described.reverse();
        let model = Model::try_from(model).unwrap();
        let tokens = model.description().tokens_per_gpu as f64;
        let problem = Problem {
            links: described,
            model: model.clone(),
            options: options.clone(),
            batch: batch.map_or(micro_batches as f64 * tokens * inside, |batch| batch as f64),
            throughput: cluster.gpu.sustained_tflops * 1e12,
            hbm: cluster.gpu.hbm_gb_per_s * 1e9,
            device: memory * 1e9,
        };
        (cluster.try_into().unwrap(), model, options, problem)
    })
}

fn shape_of(price: &StepPrice) -> Shape {
    let layout = &price.layout;
    Shape {
        across: layout.stages_across,
        inside: layout.stages_inside,
        tensor: layout.tensor_parallel,
        stage: layout.stage.clone(),
        group: layout.group.clone(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]

    #[test]
    fn prices_and_choices_are_those_of_the_formulas((cluster, model, options, problem) in any_problem()) {
        let planned = StepPlanner::new(cluster, model, options).and_then(|planner| planner.plan());
        let Ok(plan) = planned else {
            // Nothing fits. Where the model as a whole does not fit either, this is clear without a search.
            for way in Way::ALL {
                prop_assert!(problem.fastest(way).is_none(), "{way:?}");
            }
            return Ok(());
        };
        prop_assert!(!plan.truncated);
        for way in Way::ALL {
            let (found, wanted) = (plan.price(way), problem.fastest(way));
            prop_assert_eq!(found.is_some(), wanted.is_some(), "{:?}", way);
            let (Some(found), Some((fit, step))) = (found, wanted) else { continue };
            let same = problem.step(way, &shape_of(found)).unwrap();
            prop_assert!((found.step_time.0 / same - 1.0).abs() < 1e-9, "{way:?} {found:?}: {same}");
            // Of layouts within 1 % of the fastest, the planner takes the simplest.
            let over = found.step_time.0 / step;
            prop_assert!((1.0 - 1e-9..1.01 + 1e-9).contains(&over), "{way:?} {found:?}: {step}");
            prop_assert_eq!(found.fit as u8, fit);
            prop_assert!((found.tokens_per_second * same / problem.batch - 1.0).abs() < 1e-9);
            prop_assert!((0.0..=1.0).contains(&found.idle_share));
        }
    }
}
