//! Links for flows that cross several of them: the rate of a flow depends on all links of its path.
//!
//! When flows start or end, only the rates of flows that are connected to these flows through shared links can change.
//! The mesh collects these flows, updates them and computes new fair rates; the rest of the network is not touched.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::clock::{Instant, at_once};
use super::fair::{Crossing, Demand, Priority, fair_rates};
use super::pipe::Tag;

/// A network of links, and the flows on it.
#[derive(Debug, Default)]
pub(crate) struct Mesh {
    links: Vec<Link>,
    flows: Vec<Flow>,
    free: Vec<u32>,
    /// Links on which flows started or ended since rates were last computed.
    changed: Vec<u32>,
    /// Ends of flows. An entry (time, flow, version) is valid while the flow has that version.
    ends: BinaryHeap<Reverse<(Instant, u32, u32)>>,
    /// Number of rates computed so far, plus one per call of [`Mesh::settle`]. The next number identifies the round of a call.
    recomputed: u64,
}

#[derive(Debug)]
struct Link {
    capacity: f64,
    flows: Vec<u32>,
    /// Sum of the rates of the link's flows, valid since `since`.
    rate: f64,
    since: f64,
    carried: f64,
    busy: f64,
    /// The last round of [`Mesh::connected`] that found the link.
    seen: u64,
    /// Index of the link in that round.
    local: u32,
}

#[derive(Debug)]
struct Flow {
    path: Vec<Crossing>,
    left: f64,
    rate: f64,
    since: f64,
    priority: Priority,
    tag: Tag,
    version: u32,
    seen: u64,
}

impl Mesh {
    /// Adds a link and returns its number.
    pub(crate) fn add_link(&mut self, capacity: f64) -> u32 {
        let flows = Vec::new();
        self.links.push(Link {
            capacity,
            flows,
            rate: 0.0,
            since: 0.0,
            carried: 0.0,
            busy: 0.0,
            seen: 0,
            local: 0,
        });
        (self.links.len() - 1) as u32
    }

    /// Starts a bundle of flows of `bytes` each. [`Mesh::settle`] computes the rates.
    pub(crate) fn add(&mut self, now: f64, path: Vec<Crossing>, bytes: f64, priority: Priority, tag: Tag) {
        let (version, flow) = match self.free.pop() {
            Some(flow) => (self.flows[flow as usize].version.wrapping_add(1), flow),
            None => (0, self.flows.len() as u32),
        };
        for crossing in &path {
            self.links[crossing.link as usize].flows.push(flow);
            self.changed.push(crossing.link);
        }
        // The rate -1 differs from every real rate, so that `set_rate` notices the first one.
        let entry = Flow { path, left: bytes, rate: -1.0, since: now, priority, tag, version, seen: 0 };
        match self.flows.get_mut(flow as usize) {
            Some(slot) => *slot = entry,
            None => self.flows.push(entry),
        }
    }

    /// The time at which the next flow ends, if no flow starts before. Requires [`Mesh::settle`] after every change.
    pub(crate) fn next_end(&mut self) -> Option<f64> {
        while let Some(&Reverse((end, flow, version))) = self.ends.peek() {
            if self.flows[flow as usize].version == version {
                return Some(end.0);
            }
            self.ends.pop();
        }
        None
    }

    /// Removes the flows that have ended by now and appends their tags to `ended`.
    pub(crate) fn take_ended(&mut self, now: f64, ended: &mut Vec<Tag>) {
        while self.next_end().is_some_and(|end| at_once(now, end)) {
            let Some(Reverse((_, flow, _))) = self.ends.pop() else { return };
            let entry = &mut self.flows[flow as usize];
            ended.push(entry.tag);
            entry.version = entry.version.wrapping_add(1);
            for crossing in std::mem::take(&mut entry.path) {
                let link = &mut self.links[crossing.link as usize];
                link.flows.retain(|&other| other != flow);
                self.changed.push(crossing.link);
            }
            self.free.push(flow);
        }
    }

    /// Whether all rates are up to date.
    pub(crate) fn is_settled(&self) -> bool {
        self.changed.is_empty()
    }

    /// Computes the rates of all flows that are connected to a changed link.
    pub(crate) fn settle(&mut self, now: f64) {
        let round = self.recomputed + 1;
        let (links, flows) = self.connected(round);
        self.recomputed += flows.len() as u64 + 1;
        for &link in &links {
            self.links[link as usize].advance(now);
        }
        let capacities: Vec<f64> = links.iter().map(|&link| self.links[link as usize].capacity).collect();
        let local = |crossing: &Crossing| Crossing {
            link: self.links[crossing.link as usize].local,
            count: crossing.count,
        };
        let entries = flows.iter().map(|&flow| &self.flows[flow as usize]);
        let crossings: Vec<Crossing> = entries.clone().flat_map(|flow| flow.path.iter().map(local)).collect();
        let mut rest = crossings.as_slice();
        let demand = |flow: &Flow| {
            let (path, after) = rest.split_at(flow.path.len());
            rest = after;
            Demand { path, priority: flow.priority }
        };
        let demands: Vec<Demand<'_>> = entries.map(demand).collect();
        let rates = fair_rates(&capacities, &demands);
        for &link in &links {
            self.links[link as usize].rate = 0.0;
        }
        for ((&flow, demand), &rate) in flows.iter().zip(&demands).zip(&rates) {
            for crossing in demand.path {
                self.links[links[crossing.link as usize] as usize].rate += rate * crossing.count;
            }
            self.set_rate(flow, rate, now);
        }
        for &link in &links {
            let link = &mut self.links[link as usize];
            link.rate = link.rate.min(link.capacity);
        }
        // Remove invalid ends when they are the majority of the heap.
        if self.ends.len() > 4 * self.flows.len() {
            let flows = &self.flows;
            self.ends.retain(|&Reverse((_, flow, version))| flows[flow as usize].version == version);
        }
    }

    /// Bytes that a link carried, and the time during which it carried any flow.
    pub(crate) fn usage(&self, link: u32) -> (f64, f64) {
        let link = &self.links[link as usize];
        (link.carried, link.busy)
    }

    pub(crate) fn is_idle(&self, link: u32) -> bool {
        self.links[link as usize].flows.is_empty()
    }

    /// Number of rates computed so far, plus one per call of [`Mesh::settle`]. Tests check that the incremental
    /// computation keeps it small.
    #[cfg(test)]
    pub(crate) fn recomputed(&self) -> u64 {
        self.recomputed
    }

    fn set_rate(&mut self, flow: u32, rate: f64, now: f64) {
        let entry = &mut self.flows[flow as usize];
        if rate == entry.rate {
            return;
        }
        entry.left = (entry.left - entry.rate.max(0.0) * (now - entry.since)).max(0.0);
        entry.rate = rate;
        entry.since = now;
        entry.version = entry.version.wrapping_add(1);
        let end = if entry.left == 0.0 { now } else { now + entry.left / rate };
        if end.is_finite() {
            self.ends.push(Reverse((Instant(end), flow, entry.version)));
        }
    }

    /// The links and flows that are connected, directly or through other flows, to a changed link.
    fn connected(&mut self, round: u64) -> (Vec<u32>, Vec<u32>) {
        let mut links = Vec::new();
        let mut flows = Vec::new();
        let mut open = std::mem::take(&mut self.changed);
        while let Some(link) = open.pop() {
            let at = &mut self.links[link as usize];
            if at.seen == round {
                continue;
            }
            at.seen = round;
            at.local = links.len() as u32;
            links.push(link);
            for &flow in &at.flows {
                let entry = &mut self.flows[flow as usize];
                if entry.seen != round {
                    entry.seen = round;
                    flows.push(flow);
                    open.extend(entry.path.iter().map(|crossing| crossing.link));
                }
            }
        }
        (links, flows)
    }
}

impl Link {
    fn advance(&mut self, now: f64) {
        let elapsed = now - self.since;
        self.since = now;
        if self.rate > 0.0 {
            self.carried += self.rate * elapsed;
            self.busy += elapsed;
        }
    }
}
