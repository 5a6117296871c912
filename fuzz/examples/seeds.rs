//! Writes the seed corpora for fuzzing. Run `cargo run --example seeds` in `fuzz/`.

use std::collections::HashMap;
use std::error::Error;
use std::fs;

use ep_codec::residual::{Encoder, Format, IndexFormat, Selection, ValueFormat};
use ep_codec::{GradientEncoder, SharedExpert, WeightDecoder, WeightEncoder};
use ep_cuda::fuzzing::state_of;
use ep_cuda::jit::fuzzing::entry_of;
use ep_fuzz::expected;
use ep_host::fuzzing::slot_of;
use safetensors::tensor::{Dtype, TensorView};

fn main() -> Result<(), Box<dyn Error>> {
    traces()?;
    toml()?;
    codec()?;
    rail()?;
    rendezvous()?;
    migrate()?;
    cuda()
}

fn write(target: &str, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    let directory = format!("corpus/{target}");
    fs::create_dir_all(&directory)?;
    fs::write(format!("{directory}/{name}"), bytes)
}

/// Routing traces. The files differ from run to run in the order of their metadata.
fn traces() -> Result<(), Box<dyn Error>> {
    for (name, layers, ranks, tokens) in [("one", 1, 1, 3), ("several", 2, 3, 2), ("empty", 1, 2, 0)] {
        let idx: Vec<u8> =
            [0_i32, 7, 3, -1, 2, 1][..2 * tokens].iter().flat_map(|v| v.to_le_bytes()).collect();
        let weights: Vec<u8> =
            [0.5_f32, 0.5, 1.0, 0.0, 0.3, 0.7][..2 * tokens].iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut tensors = Vec::new();
        for (layer, rank) in (0..layers).flat_map(|layer| (0..ranks).map(move |rank| (layer, rank))) {
            for (what, dtype, bytes) in [("idx", Dtype::I32, &idx), ("weights", Dtype::F32, &weights)] {
                let view = TensorView::new(dtype, vec![tokens, 2], bytes)?;
                tensors.push((format!("layer{layer}.rank{rank}.topk_{what}"), view));
            }
        }
        let metadata: HashMap<String, String> = [
            ("format", "hybrid-ep-routing".to_owned()),
            ("version", "1".to_owned()),
            ("experts", "8".to_owned()),
            ("topk", "2".to_owned()),
            ("layers", layers.to_string()),
            ("ranks", ranks.to_string()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into();
        let file = safetensors::serialize(tensors, Some(metadata))?;
        write("trace", name, &[&[0], &file[..]].concat())?;
        let header = u64::from_le_bytes(*file.first_chunk().ok_or("no header")?) as usize;
        let (header, tensors) = file[8..].split_at(header);
        write("trace", &format!("{name}-header"), &[&[1], header, &[0], tensors].concat())?;
    }
    Ok(())
}

/// The TOML file in the planner's guide, its tables, and the presets written as TOML.
fn toml() -> Result<(), Box<dyn Error>> {
    let guide = fs::read_to_string("../docs/planner.md")?;
    let shown = guide.split_once("```toml\n").and_then(|(_, rest)| rest.split_once("```"));
    let (shown, _) = shown.ok_or("docs/planner.md shows no TOML")?;
    write("toml", "guide", shown.as_bytes())?;
    for (name, table) in [("cluster", "[cluster]"), ("model", "[model]"), ("options", "[options]")] {
        let from = shown.find(table).ok_or("docs/planner.md lacks a table")?;
        let part = &shown[from..];
        // The table ends where the next table begins.
        let end = ["\n[model]", "\n[options]"].iter().filter_map(|next| part.find(next)).min();
        write("toml", name, part[..end.unwrap_or(part.len())].as_bytes())?;
    }
    let cluster = ep_plan::presets::datacenters(2, 100.0, 0.005, ep_plan::presets::dgx_h200(8));
    let written = ep_plan::input::to_toml(&cluster, &ep_plan::presets::deepseek_v3(), &Default::default());
    write("toml", "written", written.as_bytes())?;
    Ok(())
}

fn codec() -> Result<(), Box<dyn Error>> {
    let weights: Vec<f32> = (0..40).map(|at| ((at * 37 % 101) as f32 - 50.0) / 8.0).collect();
    let halves: Vec<u16> = weights.iter().map(|&weight| ep::numeric::f32_to_bf16(weight)).collect();
    let shared = SharedExpert::from_weights(vec![0.0; weights.len()])?;
    let shared_halves = SharedExpert::from_weights(vec![0_u16; weights.len()])?;
    let indices = [IndexFormat::U32, IndexFormat::U16, IndexFormat::Rice];
    let values = [ValueFormat::F32, ValueFormat::Bf16, ValueFormat::Bf16Rice];
    for (i, index) in indices.into_iter().enumerate() {
        for (v, value) in values.into_iter().enumerate() {
            let encoder = Encoder { k: 9, selection: Selection::Exact, format: Format { index, value } };
            let (mut whole, mut half) = (vec![1], vec![2]);
            encoder.encode(&weights, &shared, &mut whole)?;
            encoder.encode(&halves, &shared_halves, &mut half)?;
            write("codec", &format!("f32-{i}{v}"), &whole)?;
            write("codec", &format!("bf16-{i}{v}"), &half)?;
            whole[0] = 0;
            write("codec", &format!("sealed-{i}{v}"), &whole)?;
            let mut plain = vec![3, i as u8, v as u8, 9, 0];
            plain.extend(weights.iter().flat_map(|weight| weight.to_le_bytes()));
            write("codec", &format!("weights-{i}{v}"), &plain)?;
        }
    }
    codecs(&weights)?;
    Ok(())
}

/// Streams of all codecs, numbers to encode step by step, and states.
fn codecs(weights: &[f32]) -> Result<(), Box<dyn Error>> {
    let shared = SharedExpert::from_weights(vec![1.0; weights.len()])?;
    let halves: Vec<u16> = weights.iter().map(|&weight| ep::numeric::f32_to_bf16(weight)).collect();
    for name in ["exact", "int8", "shared:0.2", "delta:0.2"] {
        let mut encoder = WeightEncoder::new(name.parse()?, weights.len())?;
        let mut stream = vec![4];
        encoder.encode(weights, Some(&shared), &mut stream)?;
        if name.starts_with("delta") {
            // The second stream has changes.
            stream.truncate(1);
            encoder.encode(shared.weights(), None, &mut stream)?;
            write("codec", "state-encoder", &[&[7], &encoder.save()[..]].concat())?;
        }
        let (kind, _) = name.split_once(':').unwrap_or((name, ""));
        write("codec", &format!("stream-{kind}"), &stream)?;
    }
    for name in ["exact", "int8", "topk:0.2"] {
        let mut encoder = GradientEncoder::new(name.parse()?, weights.len())?;
        let mut stream = vec![5];
        encoder.encode(&halves, &mut stream)?;
        let (kind, _) = name.split_once(':').unwrap_or((name, ""));
        write("codec", &format!("gradient-{kind}"), &stream)?;
        write("codec", &format!("state-{kind}"), &[&[7], &encoder.save()[..]].concat())?;
    }
    write("codec", "state-decoder", &[&[7], &WeightDecoder::new(40).save()[..]].concat())?;
    let mut steps = vec![6, 50, 0, 13];
    steps.extend(weights.iter().flat_map(|weight| weight.to_le_bytes()));
    write("codec", "steps", &steps)?;
    Ok(())
}

/// Messages with no, one and several tokens, and scripts that send and receive.
fn rail() -> Result<(), Box<dyn Error>> {
    let messages: [(&str, &[(u32, &[u32])]); 3] =
        [("none", &[]), ("one", &[(3, &[8, 11])]), ("several", &[(0, &[9]), (1, &[8, 9, 10]), (6, &[11])])];
    for (name, tokens) in messages {
        // As the target reads them: flags (lists, probabilities), bytes of a row, bytes of its scales.
        for settings in [[0b11, 16, 4], [0b01, 2, 0], [0b10, 16, 0], [0b00, 48, 1]] {
            let slot = slot_of(&expected(settings), tokens).ok_or("a message beyond memory")?;
            let name = format!("{name}-{:02b}", settings[0]);
            write("rail", &name, &[&[0], &settings[..], &slot].concat())?;
        }
    }
    // Rank 0 sends to rank 1. Rank 1 returns a credit for slot 0 and announces it. Rank 0 polls.
    let send = [3, 9, 40, 1, 160, 0, 0, 0, 1, 1, 96, 0, 1, 0, 0, 2, 5, 6];
    // Ranks 1 and 2 announce a message in their slots 0. Rank 0 polls, reads both, and returns the slots.
    let receive = [1, 96, 0, 1, 0, 0, 1, 192, 0, 1, 0, 0, 2, 4, 9, 68, 9, 5, 6];
    // Six words of 8 bytes, four of 4 bytes, and a text.
    let status = [&[255][..], &[5; 48], &2_u32.to_le_bytes(), &[1; 12], b"hidden is 128"].concat();
    write("rail", "status-failed", &status)?;
    write("rail", "status-short", &status[..60])?;
    write("rail", "blob", &[&[254], &ep_fabric::fuzzing::blob_of("tcp", b"an address")[..]].concat())?;
    write("rail", "script-send", &[&[1], &send[..]].concat())?;
    write("rail", "script-receive", &[&[1], &receive[..]].concat())?;
    Ok(())
}

/// Empty connections, an HTTP request, a forged offer, messages with and without malformed bytes, and loss messages.
fn rendezvous() -> Result<(), Box<dyn Error>> {
    let magic = b"hyb-ep03";
    for (name, who) in [("call", 0), ("answer", 1)] {
        write("rendezvous", &format!("{name}-nothing"), &[who])?;
        write("rendezvous", &format!("{name}-http"), &[&[who], &b"GET / HTTP/1.1\r\n\r\n"[..]].concat())?;
        let words = [1_u32, 1, 0, 2].map(u32::to_le_bytes).concat();
        write(
            "rendezvous",
            &format!("{name}-forged"),
            &[&[who], &magic[..], &words, &[7; 72], &[9; 32]].concat(),
        )?;
    }
    // Each piece is a kind, a length and a body. A piece whose kind is a multiple of 4 is sent as raw bytes.
    write("rendezvous", "messages", &[2, 1, 3, 7, 7, 7, 2, 0, 3, 5, 1, 0, 0, 0, 9])?;
    write("rendezvous", "malformed", &[2, 1, 1, 7, 4, 4, 2, 0, 0, 0, 1, 1, 7])?;
    write("rendezvous", "report-seen", &[&[3, 1, 0, 0, 0, 2], &b"its connection ended"[..]].concat())?;
    write("rendezvous", "report-own", &[&[3, 7, 0, 0, 0, 0x83], &b"topology: no ranks"[..]].concat())?;
    Ok(())
}

/// Headers, messages of weights with and without a shared expert, and states. The first byte is that of the target.
fn migrate() -> Result<(), Box<dyn Error>> {
    // From the kind on: streams of an expert, sender, layer, step, bytes of the body, and so on.
    let words = [1_u32, 2, 5, 0, 77, 0, 9, 0, 3, 1, 100, 0].map(u32::to_le_bytes).concat();
    for (name, kind) in [("weights", 1), ("failure", 5), ("alive", 8)] {
        write("migrate", &format!("header-{name}"), &[&[0, kind, 2, 0], &words[..]].concat())?;
    }
    let weights: Vec<f32> = (0..12).map(|at| at as f32 / 4.0).collect();
    let zeros = SharedExpert::from_weights(vec![0.0; weights.len()])?;
    // The numbers of streams are those of two experts, and of the part of a shared expert.
    for (name, choice, codecs) in [
        ("int8", 0, &["int8", "int8"][..]),
        ("shared", 2, &["shared:0.3", "shared:0.3", "exact"]),
        ("two", 1, &["exact", "shared:0.3", "int8", "shared:0.3"]),
    ] {
        let mut script = vec![1, choice];
        for codec in codecs {
            let mut stream = Vec::new();
            WeightEncoder::new(codec.parse()?, weights.len())?.encode(&weights, Some(&zeros), &mut stream)?;
            script.push(u8::try_from(stream.len())?);
            script.extend(stream);
        }
        write("migrate", &format!("weights-{name}"), &script)?;
    }
    for (name, shared) in [("delta", false), ("shared", true)] {
        let state = ep_migrate::fuzzing::state_of(shared)?;
        write("migrate", &format!("state-{name}"), &[&[2], &state[..]].concat())?;
    }
    Ok(())
}

/// States of ranks, an entry of the kernel cache, and what ranks send while joining. The first byte is that of the target.
fn cuda() -> Result<(), Box<dyn Error>> {
    write("cuda", "state-alive", &[&[0], &state_of(false)[..]].concat())?;
    write("cuda", "state-given-up", &[&[0], &state_of(true)[..]].concat())?;
    write("cuda", "entry", &[&[1], &entry_of()[..]].concat())?;
    write("cuda", "gpu", b"\x02a7a7a7a7a7a7a7a7a7a7a7a7a7a7a7a7")?;
    write("cuda", "places", &[&[2][..], &(1u64 << 40).to_le_bytes(), &3u64.to_le_bytes()].concat())?;
    write("cuda", "fabric", &[&[2][..], &(2u64 << 20).to_le_bytes(), &[0xA7; 64]].concat())?;
    Ok(())
}
