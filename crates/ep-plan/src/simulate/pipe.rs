//! A single link whose flows no other link can limit, so that they share it equally.
//!
//! When a flow starts or ends, the shares of all flows change, but they remain equal. The pipe therefore keeps one
//! number per priority, the *service*: the bytes that each flow has received since the queue was last empty. A flow of
//! `b` bytes that starts at service `s` ends at service `s + b`. A heap orders the ends, so every operation takes
//! `O(log n)` time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::clock::Instant;
use super::fair::{PRIORITIES, Priority};

/// Identifies the owner of a flow. The user of the pipe chooses the number.
pub(crate) type Tag = u64;

/// A link with one queue per priority. Flows of a priority progress only while there are no flows of higher priority.
#[derive(Debug)]
pub(crate) struct Pipe {
    capacity: f64,
    queues: [Queue; PRIORITIES],
    now: f64,
    /// Number of changes. An end that was computed before the last change is invalid.
    version: u32,
    carried: f64,
    busy: f64,
}

#[derive(Debug, Default)]
struct Queue {
    /// Bundles, ordered by the service at which they end.
    ends: BinaryHeap<Reverse<(Instant, Tag, Count)>>,
    service: f64,
    /// Number of flows, counting all flows of a bundle.
    flows: f64,
}

/// Number of flows of a bundle. All counts compare as equal, so that they do not affect the order of heap entries.
#[derive(Debug, Clone, Copy)]
struct Count(f64);

impl PartialEq for Count {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Count {}

impl PartialOrd for Count {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Count {
    fn cmp(&self, _: &Self) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}

impl Pipe {
    pub(crate) fn new(capacity: f64) -> Self {
        Self { capacity, queues: Default::default(), now: 0.0, version: 0, carried: 0.0, busy: 0.0 }
    }

    /// Starts `count` flows of `bytes` each.
    pub(crate) fn add(&mut self, now: f64, count: f64, bytes: f64, priority: Priority, tag: Tag) {
        self.advance(now);
        self.version = self.version.wrapping_add(1);
        let queue = &mut self.queues[usize::from(priority)];
        queue.ends.push(Reverse((Instant(queue.service + bytes), tag, Count(count))));
        queue.flows += count;
    }

    /// The time at which the next flow ends, if no flow starts before.
    pub(crate) fn next_end(&self) -> Option<f64> {
        let queue = &self.queues[self.serving()];
        let Reverse((end, ..)) = queue.ends.peek()?;
        Some(self.now + (end.0 - queue.service).max(0.0) * queue.flows / self.capacity)
    }

    pub(crate) fn version(&self) -> u32 {
        self.version
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.queues.iter().all(|queue| queue.ends.is_empty())
    }

    /// Removes the flows that have ended and appends their tags to `ended`. Must be called at the time that
    /// [`Pipe::next_end`] returned.
    pub(crate) fn take_ended(&mut self, now: f64, ended: &mut Vec<Tag>) {
        self.advance(now);
        self.version = self.version.wrapping_add(1);
        let serving = self.serving();
        let queue = &mut self.queues[serving];
        let Some(&Reverse((first, ..))) = queue.ends.peek() else { return };
        queue.service = queue.service.max(first.0);
        while let Some(&Reverse((end, tag, Count(count)))) = queue.ends.peek() {
            if end.0 > queue.service {
                break;
            }
            queue.ends.pop();
            queue.flows -= count;
            ended.push(tag);
        }
        if queue.ends.is_empty() {
            // Reset the service: small numbers are more precise.
            *queue = Queue { ends: std::mem::take(&mut queue.ends), ..Queue::default() };
        }
    }

    /// Bytes carried: the rate, integrated over time.
    pub(crate) fn carried(&self) -> f64 {
        self.carried
    }

    /// Time during which the link carried any flow.
    pub(crate) fn busy(&self) -> f64 {
        self.busy
    }

    fn serving(&self) -> usize {
        self.queues.iter().position(|queue| !queue.ends.is_empty()).unwrap_or(0)
    }

    fn advance(&mut self, now: f64) {
        let elapsed = now - self.now;
        self.now = now;
        let serving = self.serving();
        let queue = &mut self.queues[serving];
        if elapsed > 0.0 && !queue.ends.is_empty() {
            queue.service += elapsed * self.capacity / queue.flows;
            self.carried += elapsed * self.capacity;
            self.busy += elapsed;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(pipe: &mut Pipe, until: f64) -> Vec<(f64, Tag)> {
        let mut found = Vec::new();
        while let Some(end) = pipe.next_end().filter(|&end| end <= until) {
            let mut ended = Vec::new();
            pipe.take_ended(end, &mut ended);
            found.extend(ended.into_iter().map(|tag| (end, tag)));
        }
        found
    }

    #[test]
    fn flows_share_and_speed_up_when_others_end() {
        let mut pipe = Pipe::new(10.0);
        pipe.add(0.0, 1.0, 10.0, 0, 0);
        pipe.add(0.0, 1.0, 20.0, 0, 1);
        pipe.add(1.0, 1.0, 10.0, 0, 2);
        // 5 each until 1, then 10/3 each: the first flow ends at 2.5, when the others have 10 and 5 left.
        assert_eq!(run(&mut pipe, 100.0), [(2.5, 0), (3.5, 2), (4.0, 1)]);
        assert_eq!((pipe.carried(), pipe.busy(), pipe.is_idle()), (40.0, 4.0, true));
    }

    #[test]
    fn a_bundle_takes_as_long_as_its_flows() {
        let mut pipe = Pipe::new(10.0);
        pipe.add(0.0, 3.0, 10.0, 0, 0);
        pipe.add(0.0, 1.0, 20.0, 0, 1);
        assert_eq!(run(&mut pipe, 100.0), [(4.0, 0), (5.0, 1)]);
        assert_eq!(pipe.carried(), 50.0);
    }

    #[test]
    fn higher_priorities_stop_the_others() {
        let mut pipe = Pipe::new(10.0);
        pipe.add(0.0, 1.0, 20.0, 1, 0);
        pipe.add(1.0, 1.0, 10.0, 0, 1);
        pipe.add(1.0, 1.0, 10.0, 2, 2);
        assert_eq!(run(&mut pipe, 100.0), [(2.0, 1), (3.0, 0), (4.0, 2)]);
    }

    #[test]
    fn empty_flows_end_at_once() {
        let mut pipe = Pipe::new(10.0);
        pipe.add(3.0, 1.0, 0.0, 0, 7);
        assert_eq!(run(&mut pipe, 3.0), [(3.0, 7)]);
        assert_eq!(pipe.carried(), 0.0);
    }
}
