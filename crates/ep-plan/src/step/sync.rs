//! The exchange that makes replicas of parameters equal again: a reduce-scatter of gradients from the innermost level
//! outwards, and an all-gather of weights inwards.

use crate::cluster::Cluster;
use crate::planner::{SiteShape, Transfer, shapes, slowest};
use crate::units::{Bytes, Seconds};

/// Bytes in which gradients of dense parameters are reduced: f32.
pub(super) const DENSE_GRADIENT_BYTES: f64 = 4.0;

/// `X_l(2 (c_l − 1), A b (c_l − 1) / Π_{j>=l} c_j, 2)`: the exchange at one level, of `bytes = A b` per GPU in both
/// directions together. `copies` has the replicas at every level; of unequal sites, those of a part. The slowest site
/// determines the time.
pub(super) fn sync_at(cluster: &Cluster, index: usize, bytes: Bytes, copies: &[usize]) -> Seconds {
    // The sites see the replicas as they see the members of a domain.
    let sites = shapes(cluster, &vec![1; copies.len()]);
    let transfer = |site: &SiteShape<'_>| {
        let (part, others) = site.reduced(&site.replicas(copies), index);
        Transfer::new(&site.levels[index], 2 * others, bytes * part, 2)
    };
    slowest(sites.iter().map(transfer)).time
}

/// The sum of [`sync_at`] over the levels from `first` on.
pub(super) fn sync(cluster: &Cluster, first: usize, bytes: Bytes, copies: &[usize]) -> Seconds {
    (first..copies.len()).map(|index| sync_at(cluster, index, bytes, copies)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    /// DeepSeek-V3's 17.1 billion dense parameters over two datacenters at 10 Gbit/s: half of them cross, as an f32
    /// gradient and a bf16 weight.
    #[test]
    fn dense_gradients_of_two_datacenters() {
        let cluster = Cluster::try_from(presets::datacenters(2, 10.0, 0.005, presets::dgx_h200(8))).unwrap();
        let model: crate::Model = presets::deepseek_v3().try_into().unwrap();
        let dense = 58.0 * model.dense_parameters() + model.description().other_parameters;
        let bytes = Bytes(dense * (DENSE_GRADIENT_BYTES + 2.0));
        let across = sync_at(&cluster, 0, bytes, &[2, 8, 8]);
        assert!((across.0 - dense * 6.0 / 2.0 / 1.25e9).abs() < 0.02, "{across}");
        assert!((across.0 - 41.0).abs() < 0.2, "{across}");
        // Without replicas there is nothing to exchange.
        assert_eq!(sync(&cluster, 0, bytes, &[1, 1, 1]), Seconds::ZERO);
    }
}
