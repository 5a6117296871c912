//! How a migration starts: encoders, decoders and the post, new or from a saved state.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use ep::{Operator, Result};
use ep_codec::{Place, Weight, WeightCodec};

use super::{Clocks, Layer, Migration, Publisher, lock};
use crate::bodies::Bodies;
use crate::carrier::Carrier;
use crate::header::Kind;
use crate::inbox::{Call, Window};
use crate::owned::{Owned, Returned};
use crate::post::{Post, Resend, Setup};
use crate::replicas::{Replicas, SharedExperts};
use crate::settings::{Domain, Settings, Shape};
use crate::state::Saved;

impl<T: Weight, P: Place> Migration<T, P> {
    pub(super) fn start(
        place: P,
        domain: Domain,
        shape: Shape,
        settings: Settings,
        carrier: Box<dyn Carrier>,
        saved: Option<&Saved>,
    ) -> Result<Self> {
        shape.check()?;
        settings.check()?;
        let (experts, peers) = (shape.experts_per_rank, domain.peers());
        let step = saved.map_or(0, |saved| saved.step);
        let (mut layers, mut owned) = (Vec::new(), Vec::new());
        for (layer, &elements) in shape.expert_elements.iter().enumerate() {
            let encoders = Owned::new(place.clone(), layer, settings.weights, experts, elements)?;
            let mut publisher = Publisher { owned: encoders, published: step };
            let mut returned: Vec<Returned<P>> = peers
                .iter()
                .map(|_| Returned::new(place.clone(), layer, settings.gradients, experts, elements))
                .collect::<Result<_>>()?;
            let mut shared = SharedExperts::new(domain.ranks().len());
            if let Some(saved) = saved {
                saved.restore(layer, &mut publisher.owned, &mut returned, settings.gradients, &mut shared)?;
            }
            owned.push(Mutex::new(publisher));
            layers.push(Layer {
                replicas: Mutex::new(peers.iter().map(|_| Replicas::new(experts, elements)).collect()),
                returned: Mutex::new(returned),
                shared: Mutex::new(shared),
                progress: Mutex::default(),
            });
        }

        let owned = Arc::new(owned);
        let publishers = owned.clone();
        let resend: Resend =
            Arc::new(move |post, peer, layer| publishers_resend(&publishers, post, peer, layer));
        let longest = |bytes: &dyn Fn(usize) -> usize| -> Vec<u64> {
            shape.expert_elements.iter().map(|&elements| (experts * bytes(elements)) as u64).collect()
        };
        let element = T::ELEMENT;
        // In a step, each layer has one body of a kind.
        let posted = settings.depth.min(layers.len());
        let most = |bytes: &dyn Fn(usize) -> usize| longest(bytes).into_iter().max().unwrap_or(0);
        // A message may have complete weights besides the streams of the codec, and the part of a shared expert.
        let complete = |elements| WeightCodec::Exact.max_bytes(element, elements);
        let setup = Setup {
            rank: domain.rank(),
            peers,
            run: settings.run,
            first_step: step,
            longest: [
                longest(&|elements| settings.weights.max_bytes(element, elements) + 2 * complete(elements)),
                longest(&|elements| settings.gradients.max_bytes(element, elements)),
            ],
            windows: [
                Window {
                    regular: most(&|elements| settings.weights.regular_bytes(element, elements)),
                    // With staleness, a step may leave messages to the next one, so their number has no bound here.
                    bodies: if settings.staleness == 0 { settings.depth } else { usize::MAX },
                    posted,
                },
                Window {
                    regular: most(&|elements| settings.gradients.max_bytes(element, elements)),
                    bodies: usize::MAX,
                    posted,
                },
            ],
            // A step has two messages of each layer, in two parts each, to a peer that may lag `staleness` steps behind.
            most_sent: (4 * layers.len()).saturating_mul((settings.staleness as usize).saturating_add(2)),
            timeout: settings.timeout,
            asks: false,
            interrupt: settings.interrupt.clone(),
        };
        let (post, threads) = Post::start(setup, carrier, &resend)?;
        let (threads, clocks) = (Mutex::new(threads), Clocks::default());
        let gathered = AtomicU64::new(step);
        let bodies = Bodies::default();
        Ok(Self { place, domain, shape, settings, post, bodies, layers, owned, gathered, threads, clocks })
    }
}

/// Sends a peer the weights that its replicas should hold.
fn publishers_resend<T: Weight, P: Place>(
    publishers: &[Mutex<Publisher<T, P>>],
    post: &Post,
    peer: usize,
    layer: usize,
) -> Result<()> {
    let publisher = lock(&publishers[layer]);
    match (publisher.owned.complete()?, publisher.published.checked_sub(1)) {
        (Some(body), Some(step)) => {
            let call = Call { operator: Operator::Publish, step, layer };
            post.send(peer, call, Kind::Resent, 1, Arc::new(body))
        }
        _ => Err(post.undecodable(
            peer,
            format!("a request for complete weights of layer {layer}, which have no base"),
        )),
    }
}
