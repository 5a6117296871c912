//! The checksum: XXH64 (Yann Collet's specification 0.1.1), over chunks so that it can run on many threads.

use rayon::prelude::*;

/// Bytes that one thread hashes at a time.
const CHUNK: usize = 1 << 16;

/// XXH64 of the concatenated XXH64s (little-endian) of each 64 KiB of `bytes`, seeded with their number.
pub(super) fn digest(bytes: &[u8]) -> u64 {
    let leaves: Vec<[u8; 8]> = bytes.par_chunks(CHUNK).map(|chunk| xxh64(chunk, 0).to_le_bytes()).collect();
    xxh64(leaves.as_flattened(), bytes.len() as u64)
}

const P1: u64 = 0x9E37_79B1_85EB_CA87;
const P2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const P3: u64 = 0x1656_67B1_9E37_79F9;
const P4: u64 = 0x85EB_CA77_C2B2_AE63;
const P5: u64 = 0x27D4_EB2F_1656_67C5;

/// XXH64 of `bytes`.
pub(super) fn xxh64(bytes: &[u8], seed: u64) -> u64 {
    let (stripes, rest) = bytes.as_chunks::<32>();
    let mut hash = if stripes.is_empty() {
        seed.wrapping_add(P5)
    } else {
        let mut lanes =
            [seed.wrapping_add(P1).wrapping_add(P2), seed.wrapping_add(P2), seed, seed.wrapping_sub(P1)];
        for stripe in stripes {
            let (words, _) = stripe.as_chunks::<8>();
            for (lane, word) in lanes.iter_mut().zip(words) {
                *lane = round(*lane, u64::from_le_bytes(*word));
            }
        }
        let [a, b, c, d] = lanes;
        let sum = a
            .rotate_left(1)
            .wrapping_add(b.rotate_left(7))
            .wrapping_add(c.rotate_left(12))
            .wrapping_add(d.rotate_left(18));
        lanes.iter().fold(sum, |hash, &lane| (hash ^ round(0, lane)).wrapping_mul(P1).wrapping_add(P4))
    };
    hash = hash.wrapping_add(bytes.len() as u64);

    let (words, rest) = rest.as_chunks::<8>();
    for word in words {
        hash ^= round(0, u64::from_le_bytes(*word));
        hash = hash.rotate_left(27).wrapping_mul(P1).wrapping_add(P4);
    }
    let (halves, rest) = rest.as_chunks::<4>();
    for half in halves {
        hash ^= u64::from(u32::from_le_bytes(*half)).wrapping_mul(P1);
        hash = hash.rotate_left(23).wrapping_mul(P2).wrapping_add(P3);
    }
    for &byte in rest {
        hash ^= u64::from(byte).wrapping_mul(P5);
        hash = hash.rotate_left(11).wrapping_mul(P1);
    }
    hash = (hash ^ (hash >> 33)).wrapping_mul(P2);
    hash = (hash ^ (hash >> 29)).wrapping_mul(P3);
    hash ^ (hash >> 32)
}

fn round(lane: u64, word: u64) -> u64 {
    lane.wrapping_add(word.wrapping_mul(P2)).rotate_left(31).wrapping_mul(P1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xxh64_gives_the_published_values() {
        // The inputs and outputs of the reference implementation's own self-test: bytes of a generator, lengths that
        // take each path.
        let mut generator: u64 = 2_654_435_761;
        let bytes: Vec<u8> = (0..222)
            .map(|_| {
                let byte = (generator >> 56) as u8;
                generator = generator.wrapping_mul(11_400_714_785_074_694_797);
                byte
            })
            .collect();
        let prime = 2_654_435_761;
        for (length, seed, hash) in [
            (0, 0, 0xEF46_DB37_51D8_E999),
            (0, prime, 0xAC75_FDA2_929B_17EF),
            (1, 0, 0xE934_A84A_DB05_2768),
            (1, prime, 0x5014_6076_43A9_B4C3),
            (14, 0, 0x8282_DCC4_994E_35C8),
            (14, prime, 0xC3BD_6BF6_3DEB_6DF0),
            (222, 0, 0xB641_AE8C_B691_C174),
            (222, prime, 0x20CB_8AB7_AE10_C14A),
        ] {
            assert_eq!(xxh64(&bytes[..length], seed), hash, "length {length}, seed {seed}");
        }
        assert_eq!(xxh64(b"abc", 0), 0x44BC_2CF5_AD77_0999);
    }

    #[test]
    fn digest_sees_every_chunk_and_the_length() {
        let mut bytes = vec![0; 3 * CHUNK + 5];
        let whole = digest(&bytes);
        assert_ne!(whole, digest(&bytes[..bytes.len() - 1]));
        for at in [0, CHUNK, 3 * CHUNK, 3 * CHUNK + 4] {
            bytes[at] ^= 1;
            assert_ne!(whole, digest(&bytes));
            bytes[at] ^= 1;
        }
        assert_ne!(digest(&[]), digest(&[0]));
    }
}
