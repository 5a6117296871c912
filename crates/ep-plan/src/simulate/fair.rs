//! Max-min fair shares by progressive filling.
//!
//! The rates of all flows grow equally until a link is full. The flows through that link keep their rates; the others
//! continue to grow. The result is the unique allocation in which no flow can get a higher rate without lowering that
//! of a flow with an equal or lower rate. Flows of higher priority are allocated first; flows of lower priority share
//! the remaining bandwidth in the same way.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::clock::Instant;

/// Priority of a flow on a link: 0 is the highest, 2 the lowest.
pub(crate) type Priority = u8;

/// Number of priorities.
pub(crate) const PRIORITIES: usize = 3;

/// A link that a bundle crosses, and the number of the bundle's flows that cross it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Crossing {
    pub(crate) link: u32,
    pub(crate) count: f64,
}

/// A bundle of equal flows with the links that it crosses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Demand<'a> {
    pub(crate) path: &'a [Crossing],
    pub(crate) priority: Priority,
}

/// The rate of one flow of each bundle, in bytes per second.
///
/// The function takes `O(n log n)` time in the number of crossings: a link leaves the heap at most once per flow
/// through it that another link limits.
pub(crate) fn fair_rates(capacities: &[f64], demands: &[Demand<'_>]) -> Vec<f64> {
    let mut rates = vec![0.0; demands.len()];
    let mut left = capacities.to_vec();
    for priority in 0..PRIORITIES as Priority {
        let chosen: Vec<usize> =
            (0..demands.len()).filter(|&flow| demands[flow].priority == priority).collect();
        if !chosen.is_empty() {
            fill(capacities, &mut left, demands, &chosen, &mut rates);
        }
    }
    rates
}

fn fill(capacities: &[f64], left: &mut [f64], demands: &[Demand<'_>], chosen: &[usize], rates: &mut [f64]) {
    let mut weights = vec![0.0; left.len()];
    let mut growing = vec![0usize; left.len()];
    for crossing in chosen.iter().flat_map(|&flow| demands[flow].path) {
        weights[crossing.link as usize] += crossing.count;
        growing[crossing.link as usize] += 1;
    }
    // `through` lists the flows through each link, link by link.
    let mut ends = growing.clone();
    (1..ends.len()).for_each(|link| ends[link] += ends[link - 1]);
    let mut through = vec![0u32; ends.last().copied().unwrap_or(0)];
    let mut next: Vec<usize> = ends.iter().zip(&growing).map(|(end, count)| end - count).collect();
    let starts = next.clone();
    for &flow in chosen {
        for crossing in demands[flow].path {
            let place = &mut next[crossing.link as usize];
            through[*place] = flow as u32;
            *place += 1;
        }
    }
    let share = |left: f64, weight: f64| Instant(if weight > 0.0 { left / weight } else { f64::INFINITY });
    let mut heap: BinaryHeap<Reverse<(Instant, usize)>> = (0..left.len())
        .filter(|&link| growing[link] > 0)
        .map(|link| Reverse((share(left[link], weights[link]), link)))
        .collect();
    let mut settled = vec![false; demands.len()];
    while let Some(Reverse((seen, full))) = heap.pop() {
        if growing[full] == 0 {
            continue;
        }
        // The share of a link only grows while flows settle. An entry with an outdated share is too low: push it again.
        let now = share(left[full], weights[full]);
        if now > seen {
            heap.push(Reverse((now, full)));
            continue;
        }
        for &flow in &through[starts[full]..ends[full]] {
            let flow = flow as usize;
            if std::mem::replace(&mut settled[flow], true) {
                continue;
            }
            rates[flow] = now.0;
            for crossing in demands[flow].path {
                let link = crossing.link as usize;
                growing[link] -= 1;
                weights[link] = if growing[link] == 0 { 0.0 } else { weights[link] - crossing.count };
                left[link] -= now.0 * crossing.count;
                // Capacity below this is a rounding error of a full link.
                if left[link] < 1e-12 * capacities[link] {
                    left[link] = 0.0;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(capacities: &[f64], paths: &[&[u32]]) -> Vec<f64> {
        let paths: Vec<Vec<Crossing>> = paths
            .iter()
            .map(|path| path.iter().map(|&link| Crossing { link, count: 1.0 }).collect())
            .collect();
        let demands: Vec<Demand<'_>> = paths.iter().map(|path| Demand { path, priority: 1 }).collect();
        fair_rates(capacities, &demands)
    }

    #[test]
    fn one_link_is_shared_equally() {
        assert_eq!(rates(&[12.0], &[&[0], &[0], &[0]]), [4.0, 4.0, 4.0]);
        assert_eq!(rates(&[12.0], &[&[0]]), [12.0]);
        assert!(rates(&[12.0], &[]).is_empty());
    }

    /// The parking-lot topology: one long flow over three links, one short flow on each.
    #[test]
    fn a_long_flow_shares_each_of_its_links_with_a_short_flow() {
        assert_eq!(rates(&[1.0, 1.0, 1.0], &[&[0, 1, 2], &[0], &[1], &[2]]), [0.5; 4]);
        // The narrowest link limits the long flow; on the other links the short flows get the rest.
        assert_eq!(rates(&[1.0, 4.0, 3.0], &[&[0, 1, 2], &[0], &[1], &[2]]), [0.5, 0.5, 3.5, 2.5]);
    }

    /// An example in the style of Bertsekas and Gallager: a flow limited on another link leaves more to the other
    /// flows.
    #[test]
    fn bandwidth_that_a_limited_flow_cannot_use_goes_to_the_others() {
        let found = rates(&[10.0, 2.0], &[&[0], &[0], &[0, 1], &[1]]);
        assert_eq!(found, [4.5, 4.5, 1.0, 1.0]);
    }

    #[test]
    fn a_bundle_gets_the_rate_of_its_flows() {
        let three = [Crossing { link: 0, count: 3.0 }];
        let one = [Crossing { link: 0, count: 1.0 }];
        let demands = [Demand { path: &three, priority: 1 }, Demand { path: &one, priority: 1 }];
        assert_eq!(fair_rates(&[8.0], &demands), [2.0, 2.0]);
    }

    #[test]
    fn higher_priorities_come_first() {
        let narrow = [Crossing { link: 0, count: 1.0 }, Crossing { link: 1, count: 1.0 }];
        let wide = [Crossing { link: 1, count: 1.0 }];
        let demands = [
            Demand { path: &narrow, priority: 0 },
            Demand { path: &wide, priority: 1 },
            Demand { path: &narrow, priority: 2 },
        ];
        assert_eq!(fair_rates(&[2.0, 6.0], &demands), [2.0, 4.0, 0.0]);
    }
}
