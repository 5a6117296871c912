//! The cluster in the form that the engine uses: kinds of GPUs, groups that wait for each other, links that flows
//! cross.

use std::collections::HashMap;

use super::fair::Crossing;
use super::options::{FlowDetail, SimulationOptions, Straggler, Stragglers, Symmetry};
use super::outcome::Direction;
pub(crate) use super::shape::Family;
use super::shape::{Cut, Shape};
use super::symmetry::{Kinds, mix};
use super::work::{Exchange, LayerWork};
use crate::cluster::Cluster;

/// Kinds, groups and links. An *actor* is one simulated GPU, which represents all GPUs of its kind.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) shape: Shape,
    pub(crate) kinds: Kinds,
    /// Slowdown of each actor's computations.
    pub(crate) slowdown: Vec<f64>,
    groupings: Vec<((Family, usize), Grouping)>,
    /// The links of each level.
    uplinks: Vec<Uplinks>,
    /// All simulated links. The engine uses their indices.
    pub(crate) links: Vec<LinkInfo>,
    detail: FlowDetail,
}

/// The actors, divided into groups.
#[derive(Debug)]
pub(crate) struct Grouping {
    of: Vec<u32>,
    starts: Vec<u32>,
    members: Vec<u32>,
}

/// A simulated link, which may represent several links of the cluster.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinkInfo {
    pub(crate) level: usize,
    pub(crate) direction: Direction,
    pub(crate) link: usize,
    /// Bytes per second of all links that it combines.
    pub(crate) capacity: f64,
    /// Number of parallel links that it combines: the downlinks of one speed class.
    pub(crate) width: f64,
    /// Number of equal links of the cluster that it represents.
    pub(crate) alike: usize,
    /// Whether its flows also cross other links and thus run on the mesh.
    pub(crate) meshed: bool,
}

/// The links of one level.
#[derive(Debug)]
struct Uplinks {
    /// The uplink of each actor.
    of: Vec<u32>,
    /// For each actor, the number of GPUs of its kind that share this uplink.
    count: Vec<f64>,
    /// The downlinks, if some links of the level are slow.
    slow: Option<Downlinks>,
    /// GPUs that share a link.
    sharing: usize,
}

/// The downlinks of a level with slow links, combined by parent and speed class.
#[derive(Debug)]
struct Downlinks {
    /// Number of speed classes.
    classes: usize,
    /// Link number by parent and speed class; no entry if the parent has no link of the class.
    link: HashMap<(u32, u16), u32>,
    /// The parent of each actor.
    parent: Vec<u32>,
    /// For each actor, the number of GPUs of its kind inside its parent.
    count: Vec<f64>,
    /// GPU counts by family and speed class.
    peers: HashMap<(Family, u16), PeerCounts>,
}

/// Numbers of GPUs of one speed class.
#[derive(Debug)]
struct PeerCounts {
    /// In each group.
    in_group: Vec<u32>,
    /// In each set of GPUs that do not send to each other ([`Shape::own_side`]).
    own_side: Vec<u32>,
}

/// The links that the flows of an exchange cross. There is one flow per peer; equal flows form one bundle.
#[derive(Debug)]
pub(crate) enum Route {
    /// The flows cross one link and no other link can limit them.
    Alone(Crossing),
    /// Each bundle crosses several links, which limit it together.
    Through(Vec<Vec<Crossing>>),
    /// The flows cross several links, each of which serves them independently.
    Each(Vec<Crossing>),
}

impl World {
    pub(crate) fn new(
        cluster: &Cluster,
        options: &SimulationOptions,
        domain_sizes: &[usize],
        layer: &LayerWork,
    ) -> Self {
        let shape = Shape::new(cluster, domain_sizes);
        let slow_gpus = slow_gpus(options, shape.gpus());
        let slow_links = slow_links(options, cluster);
        let detail = options.flow_detail.resolve(shape.gpus());
        let exchanges = families(layer);
        let cuts = cuts(&exchanges, &slow_links, cluster.levels().len());
        let distinct = options.jitter > 0.0
            || detail == FlowDetail::PerDestination
            || options.symmetry == Symmetry::Ignore;
        let kinds = if distinct {
            Kinds::all_different(shape.gpus())
        } else {
            Kinds::coarsest(&shape, &cuts, first_division(&shape, &slow_gpus, &slow_links))
        };
        let slowdown = kinds.first.iter().map(|gpu| slow_gpus.get(gpu).copied().unwrap_or(1.0)).collect();
        let groupings = exchanges
            .iter()
            .map(|&(family, level)| {
                ((family, level), Grouping::new(&shape, &kinds, Cut::Group(family, level)))
            })
            .collect();
        let mut world =
            Self { shape, kinds, slowdown, groupings, uplinks: Vec::new(), links: Vec::new(), detail };
        for (level, slow) in slow_links.iter().enumerate() {
            world.add_level(cluster, level, slow, &exchanges);
        }
        world
    }

    pub(crate) fn actors(&self) -> usize {
        self.kinds.first.len()
    }

    /// The number of the grouping for exchanges of this family and level.
    pub(crate) fn grouping_of(&self, family: Family, level: usize) -> usize {
        let found = self.groupings.iter().position(|&(key, _)| key == (family, level));
        found.expect("`new` makes a grouping for every exchange of the work")
    }

    pub(crate) fn grouping(&self, number: usize) -> &Grouping {
        &self.groupings[number].1
    }

    /// The uplink of an actor at a level.
    pub(crate) fn uplink(&self, actor: u32, level: usize) -> u32 {
        self.uplinks[level].of[actor as usize]
    }

    /// The links that the flows of an actor's exchange cross. All flows carry the same number of bytes.
    pub(crate) fn route(&self, actor: u32, exchange: &Exchange) -> Route {
        let uplinks = &self.uplinks[exchange.level];
        let (link, alike) = (uplinks.of[actor as usize], uplinks.count[actor as usize]);
        let all = Crossing { link, count: alike * exchange.peers as f64 };
        if self.detail == FlowDetail::PerDestination {
            return Route::Through(self.pairs(actor, exchange, link, uplinks.sharing));
        }
        let Some(down) = &uplinks.slow else { return Route::Alone(all) };
        let gpu = self.kinds.first[actor as usize] as usize;
        let group = self.shape.set_of(Cut::Group(exchange.family, exchange.level), gpu);
        let own = self.shape.set_of(Shape::own_side(exchange.family, exchange.level), gpu);
        let bundle = |class: u16| {
            let counts = &down.peers[&(exchange.family, class)];
            let peers = f64::from(counts.in_group[group] - counts.own_side[own]);
            (peers > 0.0).then(|| {
                let landing = down.link[&(down.parent[actor as usize], class)];
                vec![
                    Crossing { link, count: alike * peers },
                    Crossing { link: landing, count: down.count[actor as usize] * peers },
                ]
            })
        };
        let bundles = (0..down.classes as u16).filter_map(bundle);
        match self.detail {
            FlowDetail::Decoupled | FlowDetail::Auto => {
                Route::Each(std::iter::once(all).chain(bundles.map(|path| path[1])).collect())
            }
            FlowDetail::Aggregated | FlowDetail::PerDestination => Route::Through(bundles.collect()),
        }
    }

    /// One flow per peer, through the peer's downlink.
    fn pairs(&self, actor: u32, exchange: &Exchange, up: u32, sharing: usize) -> Vec<Vec<Crossing>> {
        // Downlinks are numbered right after the uplinks of their level.
        let first =
            up - (actor as usize / sharing) as u32 + self.shape.sets(Cut::Link(exchange.level)) as u32;
        let path = |peer: usize| {
            let down = first + (peer / sharing) as u32;
            vec![Crossing { link: up, count: 1.0 }, Crossing { link: down, count: 1.0 }]
        };
        self.shape.peers(exchange.family, exchange.level, actor as usize).map(path).collect()
    }

    fn add_level(
        &mut self,
        cluster: &Cluster,
        level: usize,
        slow: &HashMap<usize, f64>,
        exchanges: &[(Family, usize)],
    ) {
        let sharing = cluster.levels()[level].gpus_per_link;
        let fastest = cluster.fastest_link(level);
        let capacity = |link: usize| fastest.0 / slow.get(&link).copied().unwrap_or(1.0);
        let meshed = match self.detail {
            FlowDetail::PerDestination => true,
            FlowDetail::Aggregated => !slow.is_empty(),
            FlowDetail::Decoupled | FlowDetail::Auto => false,
        };
        let first = self.links.len();
        let (of, count, instances) = self.spread(Cut::Link(level), first);
        for (link, alike) in instances {
            let (direction, capacity) = (Direction::Up, capacity(link));
            self.links.push(LinkInfo { level, direction, link, capacity, width: 1.0, alike, meshed });
        }
        let mut downlinks = None;
        if self.detail == FlowDetail::PerDestination {
            for link in 0..self.shape.sets(Cut::Link(level)) {
                let (direction, capacity) = (Direction::Down, capacity(link));
                self.links.push(LinkInfo { level, direction, link, capacity, width: 1.0, alike: 1, meshed });
            }
        } else if !slow.is_empty() {
            downlinks = Some(self.add_downlinks(level, sharing, &capacity, exchanges));
        }
        self.uplinks.push(Uplinks { of, count, slow: downlinks, sharing });
    }

    fn add_downlinks(
        &mut self,
        level: usize,
        sharing: usize,
        capacity: &dyn Fn(usize) -> f64,
        exchanges: &[(Family, usize)],
    ) -> Downlinks {
        let gpus = self.shape.gpus();
        let mut speeds: Vec<f64> = Vec::new();
        let class: Vec<u16> = (0..gpus)
            .map(|gpu| {
                let speed = capacity(gpu / sharing);
                let known = speeds.iter().position(|&other| other == speed);
                known.unwrap_or_else(|| {
                    speeds.push(speed);
                    speeds.len() - 1
                }) as u16
            })
            .collect();
        let (parent, count, instances) = self.spread(Cut::Parent(level), 0);
        let mut link = HashMap::new();
        let below = gpus / self.shape.sets(Cut::Parent(level));
        for (number, &(instance, alike)) in instances.iter().enumerate() {
            let mut width = vec![0.0; speeds.len()];
            for gpu in instance * below..(instance + 1) * below {
                width[class[gpu] as usize] += 1.0 / sharing as f64;
            }
            for (speed, &width) in width.iter().enumerate().filter(|&(_, &width)| width > 0.0) {
                link.insert((number as u32, speed as u16), self.links.len() as u32);
                self.links.push(LinkInfo {
                    level,
                    direction: Direction::Down,
                    link: instance * below / sharing,
                    capacity: speeds[speed] * width,
                    width,
                    alike,
                    meshed: self.detail == FlowDetail::Aggregated,
                });
            }
        }
        let mut peers = HashMap::new();
        for &(family, at) in exchanges.iter().filter(|&&(_, at)| at == level) {
            for wanted in 0..speeds.len() as u16 {
                let tally = |cut: Cut| {
                    let mut found = vec![0; self.shape.sets(cut)];
                    for gpu in (0..gpus).filter(|&gpu| class[gpu] == wanted) {
                        found[self.shape.set_of(cut, gpu)] += 1;
                    }
                    found
                };
                let in_group = tally(Cut::Group(family, at));
                let own_side = tally(Shape::own_side(family, at));
                peers.insert((family, wanted), PeerCounts { in_group, own_side });
            }
        }
        Downlinks { classes: speeds.len(), link, parent, count, peers }
    }

    /// Numbers the sets of a cut so that sets with equal contents share a number. Returns, for each actor, the number
    /// of its set (plus `first`) and the number of GPUs of its kind in the set; and, for each number, one of its sets
    /// and how many sets have it.
    fn spread(&self, cut: Cut, first: usize) -> (Vec<u32>, Vec<f64>, Vec<(usize, usize)>) {
        let grouping = Grouping::new(&self.shape, &self.kinds, cut);
        let of: Vec<u32> = grouping.of.iter().map(|&set| set + first as u32).collect();
        let mut count = vec![0.0; of.len()];
        let mut instances = Vec::with_capacity(grouping.starts.len() - 1);
        let mut here: Vec<usize> = Vec::with_capacity(grouping.starts.len() - 1);
        for group in 0..grouping.starts.len() - 1 {
            let actor = grouping.members[grouping.starts[group] as usize];
            here.push(self.shape.set_of(cut, self.kinds.first[actor as usize] as usize));
        }
        let number: HashMap<usize, usize> =
            here.iter().enumerate().map(|(group, &set)| (set, group)).collect();
        for (gpu, &kind) in self.kinds.of.iter().enumerate() {
            if number.contains_key(&self.shape.set_of(cut, gpu)) {
                count[kind as usize] += 1.0;
            }
        }
        for (group, &set) in here.iter().enumerate() {
            let actor = grouping.members[grouping.starts[group] as usize] as usize;
            instances.push((set, (f64::from(self.kinds.count[actor]) / count[actor]).round() as usize));
        }
        (of, count, instances)
    }
}

impl Grouping {
    fn new(shape: &Shape, kinds: &Kinds, cut: Cut) -> Self {
        let actors = kinds.first.len();
        let of: Vec<u32> = if actors == shape.gpus() {
            (0..actors).map(|gpu| shape.set_of(cut, gpu) as u32).collect()
        } else {
            let fingerprints = kinds.fingerprints(shape, cut);
            let mut numbers = HashMap::new();
            let set_of = |&gpu: &u32| {
                let next = numbers.len() as u32;
                *numbers.entry(fingerprints[shape.set_of(cut, gpu as usize)]).or_insert(next)
            };
            kinds.first.iter().map(set_of).collect()
        };
        let sets = of.iter().max().map_or(0, |&last| last as usize + 1);
        let mut starts = vec![0u32; sets + 1];
        for &set in &of {
            starts[set as usize + 1] += 1;
        }
        for set in 0..sets {
            starts[set + 1] += starts[set];
        }
        let mut next = starts.clone();
        let mut members = vec![0u32; actors];
        for (actor, &set) in of.iter().enumerate() {
            members[next[set as usize] as usize] = actor as u32;
            next[set as usize] += 1;
        }
        Self { of, starts, members }
    }

    pub(crate) fn groups(&self) -> usize {
        self.starts.len() - 1
    }

    pub(crate) fn group_of(&self, actor: u32) -> u32 {
        self.of[actor as usize]
    }

    pub(crate) fn members(&self, group: u32) -> &[u32] {
        let group = group as usize;
        &self.members[self.starts[group] as usize..self.starts[group + 1] as usize]
    }
}

fn families(layer: &LayerWork) -> Vec<(Family, usize)> {
    let lists = [&layer.gather, &layer.dispatch, &layer.combine, &layer.gradients, &layer.refresh];
    let mut found = Vec::new();
    for exchange in lists.into_iter().flatten() {
        if !found.contains(&(exchange.family, exchange.level)) {
            found.push((exchange.family, exchange.level));
        }
    }
    found
}

/// The cuts by which GPUs can differ, apart from their speed.
fn cuts(exchanges: &[(Family, usize)], slow_links: &[HashMap<usize, f64>], levels: usize) -> Vec<Cut> {
    let groups = exchanges.iter().map(|&(family, level)| Cut::Group(family, level));
    let links = (0..levels).map(Cut::Link);
    let slow = (0..levels).filter(|&level| !slow_links[level].is_empty());
    groups.chain(links).chain(slow.flat_map(|level| [Cut::Parent(level), Cut::Member(level)])).collect()
}

fn first_division(
    shape: &Shape,
    slow_gpus: &HashMap<u32, f64>,
    slow_links: &[HashMap<usize, f64>],
) -> Vec<u64> {
    let key = |gpu: usize| {
        let mut key = slow_gpus.get(&(gpu as u32)).map_or(0, |slowdown| mix(slowdown.to_bits()));
        for (level, slow) in slow_links.iter().enumerate().filter(|(_, slow)| !slow.is_empty()) {
            let slowdown = slow.get(&shape.set_of(Cut::Link(level), gpu)).copied().unwrap_or(1.0);
            key = mix(key ^ slowdown.to_bits().rotate_left(level as u32));
        }
        key
    };
    (0..shape.gpus()).map(key).collect()
}

/// The slowdown of each slow GPU. Several slowdowns of one GPU are multiplied.
fn slow_gpus(options: &SimulationOptions, gpus: usize) -> HashMap<u32, f64> {
    let mut slow = HashMap::new();
    match &options.stragglers {
        Stragglers::None => {}
        Stragglers::Listed(list) => {
            for straggler in list {
                if let Straggler::Gpu { gpu, slowdown } = *straggler {
                    *slow.entry(gpu as u32).or_insert(1.0) *= slowdown;
                }
            }
        }
        Stragglers::Random { fraction, slowdown } => {
            let wanted = (fraction * gpus as f64).round() as usize;
            slow.extend(super::random::choose(gpus, wanted, options.seed).map(|gpu| (gpu as u32, *slowdown)));
        }
    }
    slow.retain(|_, slowdown| *slowdown > 1.0);
    slow
}

/// The slowdowns of slow links, by level, compared with the fastest link of the level.
fn slow_links(options: &SimulationOptions, cluster: &Cluster) -> Vec<HashMap<usize, f64>> {
    let mut slow = vec![HashMap::new(); cluster.levels().len()];
    if let Stragglers::Listed(list) = &options.stragglers {
        for straggler in list {
            if let Straggler::Link { level, link, slowdown } = *straggler {
                *slow[level].entry(link).or_insert(1.0) *= slowdown;
            }
        }
    }
    // The links of slower sites, compared with the fastest.
    let site_gpus = cluster.gpus() / cluster.sites().len();
    for (level, slow) in slow.iter_mut().enumerate().filter(|(level, _)| cluster.has_unequal_links(*level)) {
        let fastest = cluster.fastest_link(level);
        for (site, at) in cluster.sites().iter().map(|site| site.levels[level]).enumerate() {
            let first = site * site_gpus / at.gpus_per_link;
            for link in first..((site + 1) * site_gpus).div_ceil(at.gpus_per_link) {
                *slow.entry(link).or_insert(1.0) *= fastest / at.link_bandwidth;
            }
        }
    }
    for level in &mut slow {
        level.retain(|_, slowdown| *slowdown > 1.0);
    }
    slow
}
