//! The exchange that makes replicas of parameters equal again: a reduce-scatter of gradients from the innermost level
//! outwards, and an all-gather of weights inwards. With a codec of dense gradients, the GPUs of different datacenters
//! exchange encoded shares of the gradients instead.

use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use crate::planner::{
    GradientCodec, SiteShape, Transfer, codec_text, codec_time, element_bytes, shapes, slowest,
};
use crate::units::{Bytes, Seconds};

/// Bytes per element of dense gradients, which are reduced in f32.
pub(super) const DENSE_GRADIENT_BYTES: f64 = 4.0;

/// `X_l(2 (c_l − 1), A b (c_l − 1) / Π_{j>=l} c_j, 2)`: the exchange at one level. `bytes` is `A b`, the gradients and
/// weights of a GPU's `A` parameters together. `copies` has the replicas at every level; if sites are unequal, those of
/// a part. The slowest site determines the time.
pub(super) fn sync_at(cluster: &Cluster, index: usize, bytes: Bytes, copies: &[usize]) -> Seconds {
    // The exchange depends on the links and the shares of the sites, not on domain sizes.
    let sites = shapes(cluster, &vec![1; copies.len()]);
    let transfer = |site: &SiteShape<'_>| {
        let (part, others) = site.reduced(&site.replicas(copies), index);
        Transfer::new(&site.levels[index], 2 * others, bytes * part, 2)
    };
    slowest(sites.iter().map(transfer)).time
}

/// The exchange of dense gradients between datacenters through a codec: every GPU sends its encoded share of the sum of
/// its datacenter to the GPUs of the other datacenters that have the same share, and decodes what they send.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DenseExchange {
    /// The codec.
    #[serde(with = "codec_text")]
    pub codec: GradientCodec,
    /// `X_0(D − 1, (D − 1) A b_d / Π_{j>0} c_j, 1)`: what the GPUs send to other datacenters, at the slowest site.
    pub transfer: Transfer,
    /// Time to encode a share and to decode it from every datacenter.
    pub codec_time: Seconds,
}

impl DenseExchange {
    /// The exchange of the gradients of `parameters` parameters per GPU. `copies` has the replicas at every level; if sites are
    /// unequal, those of a part. The outermost level has more than one.
    pub(super) fn between(
        cluster: &Cluster,
        codec: GradientCodec,
        parameters: f64,
        copies: &[usize],
    ) -> Self {
        let sites = shapes(cluster, &vec![1; copies.len()]);
        let exchange = |site: &SiteShape<'_>| {
            let copies = site.replicas(copies);
            let (others, messages) = site.exchanged(cluster, &copies);
            let share = parameters / copies[1..].iter().product::<f64>();
            let bytes = Bytes(share * element_bytes(codec));
            let exact = Bytes(share * DENSE_GRADIENT_BYTES);
            Self {
                codec,
                transfer: Transfer::new(&site.levels[0], messages, bytes * others, 1),
                codec_time: codec_time(codec, exact, others + 1.0, cluster.hbm_bandwidth()),
            }
        };
        let longer = |a: Self, b: Self| if b.time() > a.time() { b } else { a };
        let nothing = Self { codec, transfer: Transfer::default(), codec_time: Seconds::ZERO };
        sites.iter().map(exchange).reduce(longer).unwrap_or(nothing)
    }

    /// The time of the exchange, including its codec.
    pub fn time(&self) -> Seconds {
        self.transfer.time + self.codec_time
    }
}

/// The sum of [`sync_at`] over level `first` and all levels inside it.
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

    /// Each datacenter sends its sum once to every other one, as `docs/migration.md` says: with three datacenters it sends it
    /// twice, in one message per GPU and receiving datacenter.
    #[test]
    fn every_datacenter_sends_its_encoded_sum_to_all_others() {
        let cluster = Cluster::try_from(presets::datacenters(3, 10.0, 0.005, presets::dgx_h200(8))).unwrap();
        let (parameters, alpha) = (6.4e9, cluster.levels()[0].alpha.0);
        for (codec, bytes) in [(GradientCodec::Exact, 4.0), (GradientCodec::Int8, 132.0 / 128.0)] {
            let found = DenseExchange::between(&cluster, codec, parameters, &[3, 8, 8]);
            let link = 2.0 * parameters * bytes;
            assert_eq!((found.transfer.messages, found.transfer.bytes_per_gpu.0), (2, link / 64.0));
            assert_eq!(found.transfer.bytes_per_link.0, link);
            let expected = link / 1.25e9 + 0.005 + 2.0 * alpha;
            assert!((found.transfer.time.0 - expected).abs() < 1e-9, "{found:?}");
            assert_eq!(found.time(), found.transfer.time + found.codec_time);
        }
    }

    /// Sites of 2, 2 and 1 parts. A GPU of the smallest site has a share twice as large as the other GPUs, so its share
    /// overlaps those of two GPUs of each other site.
    #[test]
    fn shares_of_unequal_sites_overlap() {
        let mut description = presets::datacenters(3, 10.0, 0.0, presets::dgx_h200(8));
        description.levels[1].set_members(&[8, 8, 4]);
        let cluster = Cluster::try_from(description).unwrap();
        let found = DenseExchange::between(&cluster, GradientCodec::Exact, 1e9, &[5, 4, 8]);
        // The link of every site carries the same bytes; a GPU of the smallest site starts the most messages.
        assert_eq!((found.transfer.messages, found.transfer.bytes_per_link.0), (4, 8e9));
        assert_eq!(found.transfer.bytes_per_gpu.0, 8e9 / 32.0);
    }
}
