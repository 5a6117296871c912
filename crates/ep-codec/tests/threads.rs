//! The codecs without rayon's threads. The test has a program of its own, because a process cannot get its global pool
//! back.

use std::io;

use ep_codec::{GradientEncoder, WeightDecoder, WeightEncoder, add_gradient};
use rayon::ThreadPoolBuilder;

#[test]
fn codecs_work_on_the_calling_thread_if_the_global_pool_has_no_threads() {
    let builder = ThreadPoolBuilder::new().num_threads(2);
    let refused = builder.spawn_handler(|_| Err(io::ErrorKind::WouldBlock.into())).build_global();
    assert!(refused.is_err());

    let work = || {
        let elements = 200_000;
        let weights: Vec<f32> = (0..elements).map(|at| (at % 251) as f32 - 125.0).collect();
        let (mut replica, mut bytes) = (vec![0.0; elements], Vec::new());
        WeightEncoder::new("exact".parse().unwrap(), elements)
            .and_then(|mut encoder| encoder.encode(&weights, None, &mut bytes))
            .unwrap();
        WeightDecoder::new(elements).decode(&bytes, None, &mut replica).unwrap();
        assert_eq!(replica, weights);

        let (mut sum, mut bytes) = (vec![0.0; elements], Vec::new());
        let mut encoder = GradientEncoder::new("topk:0.1".parse().unwrap(), elements).unwrap();
        encoder.encode(&weights, &mut bytes).unwrap();
        add_gradient(&bytes, &mut sum).unwrap();
        assert!(sum.iter().zip(encoder.carry()).zip(&weights).all(|((sum, carry), all)| sum + carry == *all));
    };
    // Each thread works alone, the second time too.
    std::thread::scope(|scope| [(); 2].map(|()| scope.spawn(work)).map(|thread| thread.join().unwrap()));
    (0..2).for_each(|_| work());
}
