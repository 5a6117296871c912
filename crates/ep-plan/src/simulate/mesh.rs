//! Links that flows cross several of: a flow's rate depends on what all its links carry.
//!
//! When flows come or go, only the flows that are connected to them through shared links can change their rates.
//! These are collected, brought up to date and given new fair shares; the rest of the network is not touched.

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
    /// Links whose flows came or went since rates were last computed.
    changed: Vec<u32>,
    /// Ends of flows, with the version of the flow that they hold for.
    ends: BinaryHeap<Reverse<(Instant, u32, u32)>>,
    /// Flows whose rates were computed, each time that they were.
    recomputed: u64,
}

#[derive(Debug)]
struct Link {
    capacity: f64,
    flows: Vec<u32>,
    /// Sum of the rates of what crosses it, and since when.
    rate: f64,
    since: f64,
    carried: f64,
    busy: f64,
    /// The round of collecting in which it was found last.
    seen: u64,
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
    /// Adds a link and says its number.
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

    /// Lets a bundle of flows begin, `bytes` each. Rates are computed by [`Mesh::settle`].
    pub(crate) fn add(&mut self, now: f64, path: Vec<Crossing>, bytes: f64, priority: Priority, tag: Tag) {
        let (version, flow) = match self.free.pop() {
            Some(flow) => (self.flows[flow as usize].version.wrapping_add(1), flow),
            None => (0, self.flows.len() as u32),
        };
        for crossing in &path {
            self.links[crossing.link as usize].flows.push(flow);
            self.changed.push(crossing.link);
        }
        // No rate yet: whatever it gets is a change.
        let entry = Flow { path, left: bytes, rate: -1.0, since: now, priority, tag, version, seen: 0 };
        match self.flows.get_mut(flow as usize) {
            Some(slot) => *slot = entry,
            None => self.flows.push(entry),
        }
    }

    /// When the next flow ends if none comes before. Nothing may have changed since [`Mesh::settle`].
    pub(crate) fn next_end(&mut self) -> Option<f64> {
        while let Some(&Reverse((end, flow, version))) = self.ends.peek() {
            if self.flows[flow as usize].version == version {
                return Some(end.0);
            }
            self.ends.pop();
        }
        None
    }

    /// Takes out what has ended by now.
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

    /// Whether rates have to be computed anew.
    pub(crate) fn is_settled(&self) -> bool {
        self.changed.is_empty()
    }

    /// Computes the rates of everything that is connected to what changed.
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
        // Ends that no longer hold leave when they are most of all.
        if self.ends.len() > 4 * self.flows.len() {
            let flows = &self.flows;
            self.ends.retain(|&Reverse((_, flow, version))| flows[flow as usize].version == version);
        }
    }

    /// Bytes that a link carried, and how long it carried any.
    pub(crate) fn usage(&self, link: u32) -> (f64, f64) {
        let link = &self.links[link as usize];
        (link.carried, link.busy)
    }

    pub(crate) fn is_idle(&self, link: u32) -> bool {
        self.links[link as usize].flows.is_empty()
    }

    /// Flows whose rates were computed, counted each time: what the incremental computation keeps small.
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

    /// The links and flows that share links, directly or through others, with a link that changed.
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
