//! Code shared by the fuzz targets and `examples/seeds.rs`.

use ep_host::fuzzing::Expected;

/// The settings of a message's receiver: the third chunk of 8 tokens, for experts 8 to 11.
pub fn expected([flags, row_bytes, scale_bytes]: [u8; 3]) -> Expected {
    Expected {
        lists: flags & 1 != 0,
        probs: flags & 2 != 0,
        row_bytes: row_bytes.into(),
        scale_bytes: scale_bytes.into(),
        chunk: 2,
        tokens: 16..24,
        positions: 8..12,
    }
}
