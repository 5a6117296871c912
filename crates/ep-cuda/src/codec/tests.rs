//! Compares the codecs of a [`GpuPlace`] with those of main memory: on a CPU, which runs the kernels as C++, and on a GPU if there
//! is one.

use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use std::{env, fs, thread};

use ep::{EnvironmentError, PeerFault, Rank, Result};
use ep_codec::{
    CallerError, Error, GradientCodec, GradientEncoder, Host, Operand, Place, Weight, WeightCodec,
    WeightDecoder, WeightEncoder, add_gradient, add_gradient_in, in_main_memory,
};
use ep_migrate::{Domain, LocalNetwork, Migration, Settings, Shape};

use super::machine::{HostMemory, Launch, Machine, Memory};
use super::*;
use crate::params::CODEC_THREADS;

/// Runs the kernels as C++. Memory of the GPU is main memory.
#[derive(Debug)]
struct Cpu;

type LaunchFunction = unsafe extern "C" fn(*const c_char, u32, u32, *const c_void) -> c_int;

/// The compiled kernels. Their lanes share variables, so one launch runs at a time.
fn kernels() -> &'static Mutex<libloading::Library> {
    static KERNELS: OnceLock<Mutex<libloading::Library>> = OnceLock::new();
    KERNELS.get_or_init(|| {
        let crate_folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let test = env::current_exe().unwrap();
        // Tests of other builds may run at the same time.
        let folder = test.with_extension("codec");
        fs::create_dir_all(&folder).unwrap();
        let library = folder.join(format!("kernels-{}.so", std::process::id()));
        let compiler = env::var_os("CXX").unwrap_or_else(|| "g++".into());
        let mut compile = Command::new(compiler);
        compile.args(["-std=c++20", "-O1", "-shared", "-fPIC", "-ffp-contract=off"]);
        for headers in ["device/codec", "device/common"] {
            compile.arg("-I").arg(crate_folder.join(headers));
        }
        compile.arg(crate_folder.join("tests/codec/cpu.cpp")).arg("-o").arg(&library);
        let compiled = compile.output().unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        // SAFETY: the library has no initialisers with side effects.
        let loaded = unsafe { libloading::Library::new(&library) }.unwrap();
        fs::remove_file(&library).unwrap();
        Mutex::new(loaded)
    })
}

fn memory(bytes: usize) -> Memory {
    // Words, so that the memory is aligned; not zero, as little as memory of a GPU is.
    let mut words = vec![0xA5A5_A5A5_A5A5_A5A5_u64; bytes.div_ceil(8).max(1)];
    let address = words.as_mut_ptr() as DeviceAddress;
    Memory { address, bytes, _owner: Some(Box::new(words)) }
}

impl Machine for Cpu {
    fn number(&self) -> usize {
        0
    }

    unsafe fn follow(&self, _: *mut c_void) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, bytes: usize) -> Result<Memory> {
        Ok(memory(bytes))
    }

    fn pin(&self, bytes: usize) -> Result<HostMemory> {
        let memory = memory(bytes);
        Ok(HostMemory { start: std::ptr::NonNull::new(memory.address as *mut u8).unwrap(), memory })
    }

    fn blocks(&self) -> u32 {
        3
    }

    unsafe fn launch(&self, launch: &Launch, blocks: u32) -> Result<()> {
        let name = CString::new(launch.kernel().name()).unwrap();
        let params: *const c_void = match launch {
            Launch::Int8Encode(params) => std::ptr::from_ref(params).cast(),
            Launch::Int8Decode(params) => std::ptr::from_ref(params).cast(),
            Launch::Residuals(params) => std::ptr::from_ref(params).cast(),
            Launch::Entries(params) => std::ptr::from_ref(params).cast(),
            Launch::Sums(params) => std::ptr::from_ref(params).cast(),
        };
        let library = kernels().lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the function has this type. It is called with the parameters of the kernel.
        let answer = unsafe {
            let function = library.get::<LaunchFunction>(b"launch\0").unwrap();
            function(name.as_ptr(), blocks, CODEC_THREADS as u32, params)
        };
        assert_eq!(answer, 0, "{launch:?}");
        Ok(())
    }

    fn zero(&self, to: DeviceAddress, bytes: usize) -> Result<()> {
        // SAFETY: the place zeroes memory that it has allocated.
        unsafe { (to as *mut u8).write_bytes(0, bytes) };
        Ok(())
    }

    fn upload(&self, bytes: &[u8], to: DeviceAddress) -> Result<()> {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        Ok(())
    }

    fn download(&self, from: DeviceAddress, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        Ok(())
    }
}

fn cpu() -> GpuPlace {
    GpuPlace::of(Arc::new(Cpu))
}

/// The CPU and, if there is one, a GPU.
fn places() -> Vec<GpuPlace> {
    let gpu = crate::check_available().is_ok().then(|| GpuPlace::new(0).unwrap());
    [Some(cpu()), gpu].into_iter().flatten().collect()
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// Roughly normal, of a magnitude as weights have; sometimes zero, a repeated value, tiny or huge.
    fn element<T: Weight>(&mut self) -> T {
        let sum: i64 = (0..4).map(|_| (self.next() >> 40) as i64 - (1 << 23)).sum();
        let usual = sum as f32 / (1 << 24) as f32;
        T::from_f32(match self.next() % 64 {
            0 => 0.0,
            1 => -0.75,
            2 => 0.75,
            3 => usual * 1e-38,
            4 => f32::from_bits(1 + self.next() as u32 % 9),
            5 if self.next().is_multiple_of(64) => usual * 1e37,
            _ => usual,
        })
    }

    fn elements<T: Weight>(&mut self, count: usize) -> Vec<T> {
        (0..count).map(|_| self.element()).collect()
    }
}

fn bits<T: Weight>(elements: &[T]) -> &[u8] {
    bytemuck::cast_slice(elements)
}

fn in_host<T: Weight>(place: &GpuPlace, elements: &GpuVec<T>) -> Vec<T> {
    in_main_memory(place, GpuPlace::kept(elements), <[T]>::to_vec).unwrap()
}

/// Around the sizes of blocks, groups of blocks and tiles.
const LENGTHS: [usize; 8] = [1, 3, 127, 129, 2047, 2050, 4096, 4100];
/// More than a block of residuals. The lanes of the CPU take turns slowly.
const LONG: usize = 70_001;

fn weights_are_equal<T: Weight>(place: &GpuPlace, codec: WeightCodec, length: usize) {
    let mut random = Random(length as u64);
    let mut there = WeightEncoder::<T, _>::new_in(place.clone(), codec, length).unwrap();
    let mut here = WeightEncoder::<T>::new(codec, length).unwrap();
    let (mut decoder_there, mut decoder_here) = (WeightDecoder::new(length), WeightDecoder::new(length));
    let mut replica_there = place.keep(random.elements::<T>(length)).unwrap();
    let mut replica_here = vec![T::from_f32(7.0); length];
    let mut weights = random.elements::<T>(length);
    for step in 0..4 {
        for weight in &mut weights {
            if random.next().is_multiple_of(3) {
                let moved = weight.to_f32() + random.element::<T>().to_f32() / 64.0;
                *weight = T::from_f32(if moved.is_finite() { moved } else { 1.0 });
            }
        }
        let lent = place.keep(weights.clone()).unwrap();
        let (mut stream_there, mut stream_here) = (vec![1, 2], vec![1, 2]);
        let info = there.encode(GpuPlace::kept(&lent), None, &mut stream_there).unwrap();
        assert_eq!(info, here.encode(&weights, None, &mut stream_here).unwrap());
        assert!(stream_there == stream_here, "{codec}, {length} weights, step {step}");
        assert_eq!(there.has_mirror(), here.has_mirror());
        assert!(there.save_from().unwrap() == here.save(), "{codec}, {length} weights, step {step}");

        let out = GpuPlace::kept_mut(&mut replica_there);
        decoder_there.decode_in(place, &stream_there[2..], None, out).unwrap();
        decoder_here.decode(&stream_here[2..], None, &mut replica_here).unwrap();
        assert!(
            bits(&in_host(place, &replica_there)) == bits(&replica_here),
            "{codec}, {length}, step {step}"
        );
        if step == 1 {
            // A checkpoint of one place continues at the other one.
            let saved = here.save();
            there = WeightEncoder::restore_in(place.clone(), codec, length, &saved).unwrap();
        }
    }
}

#[test]
fn weights_are_those_of_main_memory() {
    for place in places() {
        for length in LENGTHS {
            for codec in ["exact", "int8", "delta:0.01", "delta:0.3,warm_up=2", "delta:1"] {
                let codec = codec.parse().unwrap();
                weights_are_equal::<f32>(&place, codec, length);
                weights_are_equal::<u16>(&place, codec, length);
            }
        }
        weights_are_equal::<u16>(&place, "delta:0.01".parse().unwrap(), LONG);
    }
}

fn gradients_are_equal<T: Weight>(place: &GpuPlace, codec: GradientCodec, length: usize) {
    let mut random = Random(3 * length as u64);
    let mut there = GradientEncoder::new_in(place.clone(), codec, length).unwrap();
    let mut here = GradientEncoder::new(codec, length).unwrap();
    let mut sum_here = random.elements::<f32>(length);
    let mut sum_there = place.keep(sum_here.clone()).unwrap();
    for step in 0..4 {
        // Now and then gradients of the other type, as the first ones of another layer have.
        let gradient = random.elements::<T>(length);
        let lent = place.keep(gradient.clone()).unwrap();
        let (mut stream_there, mut stream_here) = (Vec::new(), Vec::new());
        let info = there.encode(GpuPlace::kept(&lent), &mut stream_there).unwrap();
        assert_eq!(info, here.encode(&gradient, &mut stream_here).unwrap());
        assert!(stream_there == stream_here, "{codec}, {length} gradients, step {step}");
        assert!(there.save_from().unwrap() == here.save(), "{codec}, {length} gradients, step {step}");

        add_gradient_in(place, &stream_there, GpuPlace::kept_mut(&mut sum_there)).unwrap();
        add_gradient(&stream_here, &mut sum_here).unwrap();
        place.add(GpuPlace::kept(&lent), GpuPlace::kept_mut(&mut sum_there)).unwrap();
        Host.add(&gradient, &mut sum_here).unwrap();
        assert!(bits(&in_host(place, &sum_there)) == bits(&sum_here), "{codec}, {length}, step {step}");
        if step == 2 {
            there = GradientEncoder::restore_in(place.clone(), codec, length, &here.save()).unwrap();
        }
    }
}

#[test]
fn gradients_are_those_of_main_memory() {
    for place in places() {
        for length in LENGTHS {
            for codec in ["exact", "int8", "topk:0.01", "topk:0.5", "topk:1"] {
                let codec = codec.parse().unwrap();
                gradients_are_equal::<f32>(&place, codec, length);
                gradients_are_equal::<u16>(&place, codec, length);
            }
        }
        gradients_are_equal::<f32>(&place, "topk:0.01".parse().unwrap(), LONG);
    }
}

#[test]
fn numbers_that_are_not_finite_are_refused_and_nothing_changes() {
    let (length, at) = (5000, 2345);
    for place in places() {
        for bad in [f32::NAN, f32::NEG_INFINITY] {
            let mut numbers = vec![0.5_f32; length];
            (numbers[at], numbers[at + 1], numbers[at + 700]) = (bad, bad, bad);
            let lent = place.keep(numbers).unwrap();
            let lent = GpuPlace::kept(&lent);
            assert_eq!(place.first_not_finite(lent), Ok(Some(at)));
            assert_eq!(place.first_not_finite(GpuPlace::part(lent, at + 2..length)), Ok(Some(698)));
            assert_eq!(place.first_not_finite(GpuPlace::part(lent, at + 701..length)), Ok(None));
            let not_finite = |what| Err(Error::Caller(CallerError::NotFinite { what, index: at }));
            for codec in ["int8", "delta:0.1", "topk:0.1"] {
                let mut out = vec![9];
                if let Ok(codec) = codec.parse() {
                    let mut encoder = WeightEncoder::new_in(place.clone(), codec, length).unwrap();
                    assert_eq!(encoder.encode(lent, None, &mut out), not_finite(Operand::Expert), "{codec}");
                }
                if let Ok(codec) = codec.parse() {
                    let mut encoder = GradientEncoder::new_in(place.clone(), codec, length).unwrap();
                    let fine = place.keep(vec![0.3_f32; length]).unwrap();
                    encoder.encode(GpuPlace::kept(&fine), &mut Vec::new()).unwrap();
                    let before = encoder.save_from().unwrap();
                    assert_eq!(encoder.encode(lent, &mut out), not_finite(Operand::Gradient), "{codec}");
                    assert!(encoder.save_from().unwrap() == before);
                }
                assert_eq!(out, [9]);
            }
        }
        // Finite numbers whose sum or difference is not.
        let huge = place.keep(vec![f32::MAX; length]).unwrap();
        let negative = place.keep(vec![-f32::MAX; length]).unwrap();
        let mut encoder =
            GradientEncoder::new_in(place.clone(), "topk:0.1".parse().unwrap(), length).unwrap();
        encoder.encode(GpuPlace::kept(&huge), &mut Vec::new()).unwrap();
        let refused = encoder.encode(GpuPlace::kept(&huge), &mut Vec::new());
        let expected = CallerError::NotFinite { what: Operand::Carried, index: 0 };
        assert_eq!(refused, Err(Error::Caller(expected)));
        let mut encoder = WeightEncoder::new_in(place.clone(), "delta:0.1".parse().unwrap(), length).unwrap();
        encoder.encode(GpuPlace::kept(&huge), None, &mut Vec::new()).unwrap();
        let refused = encoder.encode(GpuPlace::kept(&negative), None, &mut Vec::new());
        let expected = CallerError::NotFinite { what: Operand::Residual, index: 0 };
        assert_eq!(refused, Err(Error::Caller(expected)));
    }
}

#[test]
fn extreme_numbers_have_the_scales_of_main_memory() {
    for place in places() {
        for largest in [f32::MAX, 1e38, 1.5e-36, 1.4e-36, f32::MIN_POSITIVE, 1e-45, 0.0] {
            let numbers: Vec<f32> = [1.0, -1.0, 0.5, -0.25].repeat(50).iter().map(|&x| x * largest).collect();
            let lent = place.keep(numbers.clone()).unwrap();
            let (mut there, mut here) = (Vec::new(), Vec::new());
            let codec = WeightCodec::Int8;
            let mut encoder = WeightEncoder::new_in(place.clone(), codec, numbers.len()).unwrap();
            encoder.encode(GpuPlace::kept(&lent), None, &mut there).unwrap();
            WeightEncoder::new(codec, numbers.len()).unwrap().encode(&numbers, None, &mut here).unwrap();
            assert!(there == here, "{largest}");
        }
    }
}

#[test]
fn a_hostile_stream_of_changes_is_refused_before_the_replica_changes() {
    let length = 3000;
    for place in places() {
        let codec = "delta:0.5".parse().unwrap();
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let mut encoder = WeightEncoder::<f32>::new(codec, length).unwrap();
        encoder.encode(&vec![1e38; length], None, &mut first).unwrap();
        encoder.encode(&vec![3e38; length], None, &mut second).unwrap();
        let mut decoder = WeightDecoder::new(length);
        let mut replica = place.zeros::<f32>(length).unwrap();
        decoder.decode_in(&place, &first, None, GpuPlace::kept_mut(&mut replica)).unwrap();
        // A replica that is not what the sender believes, as only a hostile sender brings about.
        place.write(bits(&vec![3e38_f32; length]), GpuPlace::kept_mut(&mut replica)).unwrap();
        let decoded = decoder.decode_in(&place, &second, None, GpuPlace::kept_mut(&mut replica));
        assert!(matches!(decoded, Err(Error::Corrupted(_))), "{decoded:?}");
        assert_eq!(in_host(&place, &replica), vec![3e38_f32; length]);
    }
}

#[test]
fn the_floor_is_reached_by_enough_residuals() {
    let infinite = INFINITE as usize >> RESIDUAL_BIN_SHIFT;
    let mut counts = vec![0; RESIDUAL_BINS];
    (counts[5], counts[infinite - 1], counts[infinite]) = (100, 7, 2);
    let bin = |bin: usize| (bin as u32) << RESIDUAL_BIN_SHIFT;
    // All that are not finite are always among them.
    for (k, floor) in [
        (0, (INFINITE, 2)),
        (2, (INFINITE, 2)),
        (3, (bin(infinite - 1), 9)),
        (10, (bin(5), 109)),
        (109, (bin(5), 109)),
        (110, (0, 109)),
    ] {
        assert_eq!(floor_of(&counts, k), floor, "{k}");
    }
}

/// Two ranks with two layers through some steps; returns all weights, sums and the state of rank 0.
fn trained<T: Weight, P: Place>(place: &P, codecs: (&str, &str)) -> Vec<u8> {
    let network = LocalNetwork::new();
    let elements = [700, 2304];
    let start = |rank| {
        let shape = Shape { experts_per_rank: 2, expert_elements: elements.to_vec() };
        let (weights, gradients) = (codecs.0.parse().unwrap(), codecs.1.parse().unwrap());
        let settings = Settings { weights, gradients, shared_refresh: 2, ..Settings::default() };
        let domain = Domain::new(rank, &[Rank(0), Rank(1)]).unwrap();
        let carrier = Box::new(network.carrier(rank));
        Migration::<T, P>::new_in(place.clone(), domain, shape, settings, carrier).unwrap()
    };
    let work = |migration: Migration<T, P>, rank: u64| {
        let mut results = Vec::new();
        let mut random = Random(rank);
        let all = |count: usize| 2 * count;
        let mut replicas = elements.map(|count| place.zeros::<T>(all(count)).unwrap());
        for _ in 0..4 {
            for (layer, replicas) in replicas.iter_mut().enumerate() {
                let count = all(elements[layer]);
                let weights = place.keep(random.elements::<T>(count)).unwrap();
                migration.publish(layer, P::kept(&weights)).unwrap();
                migration.gather(layer, P::kept_mut(replicas)).unwrap();
                let gradients = place.keep(random.elements::<T>(count)).unwrap();
                migration.send_gradients(layer, P::kept(&gradients)).unwrap();
                let mut sum = place.keep(random.elements::<f32>(count)).unwrap();
                migration.reduce_gradients(layer, P::kept(&weights), P::kept_mut(&mut sum)).unwrap();
                in_main_memory(place, P::kept(replicas), |all| results.extend_from_slice(bits(all))).unwrap();
                in_main_memory(place, P::kept(&sum), |all| results.extend_from_slice(bits(all))).unwrap();
            }
        }
        results.extend(migration.save().unwrap());
        migration.close();
        results
    };
    let (zero, one) = (start(Rank(0)), start(Rank(1)));
    thread::scope(|scope| {
        let other = scope.spawn(|| work(one, 1));
        let mut results = work(zero, 0);
        results.extend(other.join().unwrap());
        results
    })
}

#[test]
fn a_migration_has_the_bits_of_one_in_main_memory() {
    for place in places() {
        for codecs in
            [("exact", "exact"), ("int8", "int8"), ("delta:0.1", "topk:0.1"), ("shared:0.1", "int8")]
        {
            assert!(trained::<f32, _>(&place, codecs) == trained::<f32, _>(&Host, codecs), "{codecs:?}");
            assert!(trained::<u16, _>(&place, codecs) == trained::<u16, _>(&Host, codecs), "{codecs:?}");
        }
    }
}

/// Fails once, after it has done so many things, or runs no kernels and notes their parameters.
#[derive(Debug)]
struct Probe {
    left: AtomicUsize,
    runs: bool,
    sums: Mutex<Vec<SumsParams>>,
}

impl Probe {
    fn new(left: usize, runs: bool) -> Arc<Self> {
        Arc::new(Self { left: AtomicUsize::new(left), runs, sums: Mutex::default() })
    }

    fn ask(&self) -> Result<()> {
        if self.left.fetch_sub(1, Relaxed) != 0 {
            return Ok(());
        }
        Err(EnvironmentError::new("allocating", "there is no memory", "free some").into())
    }
}

impl Machine for Probe {
    fn number(&self) -> usize {
        Cpu.number()
    }

    unsafe fn follow(&self, _: *mut c_void) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, bytes: usize) -> Result<Memory> {
        self.ask()?;
        Cpu.allocate(bytes)
    }

    fn pin(&self, bytes: usize) -> Result<HostMemory> {
        self.ask()?;
        Cpu.pin(bytes)
    }

    fn blocks(&self) -> u32 {
        Cpu.blocks()
    }

    unsafe fn launch(&self, launch: &Launch, blocks: u32) -> Result<()> {
        self.ask()?;
        if let Launch::Sums(params) = launch {
            self.sums.lock().unwrap().push(*params);
        }
        // SAFETY: as for this function.
        if self.runs { unsafe { Cpu.launch(launch, blocks) } } else { Ok(()) }
    }

    fn zero(&self, to: DeviceAddress, bytes: usize) -> Result<()> {
        Cpu.zero(to, bytes)
    }

    fn upload(&self, bytes: &[u8], to: DeviceAddress) -> Result<()> {
        Cpu.upload(bytes, to)
    }

    fn download(&self, from: DeviceAddress, bytes: &mut [u8]) -> Result<()> {
        Cpu.download(from, bytes)
    }

    fn finish(&self) -> Result<()> {
        self.ask()
    }
}

#[test]
fn more_elements_than_a_kernel_counts_are_added_in_parts() {
    let probe = Probe::new(usize::MAX, false);
    let place = GpuPlace::of(probe.clone());
    let len = (5 << 30) + 7;
    let elements = GpuRef::<u16> { address: 1 << 20, len, gpu: 0, lent: PhantomData };
    let sum = GpuMut::<f32> { address: 1 << 50, len, gpu: 0, lent: PhantomData };
    place.add(elements, sum).unwrap();
    assert_eq!(place.first_not_finite(elements), Ok(None));
    let launches = probe.sums.lock().unwrap();
    let of = |all: &[SumsParams]| -> Vec<(u64, u64, u64, u32)> {
        all.iter().map(|one| (one.elements, one.addend, one.sums, one.count)).collect()
    };
    let part = |start: u64, sum: u64, count| ((1 << 20) + 2 * start, sum, sum, count);
    let starts = [0, 1 << 31, 2 << 31];
    let counts = [1 << 31, 1 << 31, (1 << 30) + 7];
    let added: Vec<_> =
        starts.iter().zip(counts).map(|(&start, count)| part(start, (1 << 50) + 4 * start, count)).collect();
    let checked: Vec<_> = starts.iter().zip(counts).map(|(&start, count)| part(start, 0, count)).collect();
    assert_eq!(of(&launches[..3]), added);
    assert_eq!(of(&launches[3..]), checked);
}

#[test]
fn lengths_that_do_not_agree_are_refused_before_a_kernel_runs() {
    let place = cpu();
    let kept = |elements: usize| place.zeros::<f32>(elements).unwrap();
    let entries = |position| vec![Entries { positions: vec![position], values: vec![1.0] }];
    type Call<'a> = Box<dyn Fn() -> bool + 'a>;
    let calls: [(&str, Call<'_>); 8] = [
        ("write", Box::new(|| place.write(&[0; 12], GpuPlace::kept_mut(&mut kept(2))).is_ok())),
        ("read", Box::new(|| place.read(GpuPlace::kept(&kept(2)), &mut [0; 4]).is_ok())),
        ("encode", Box::new(|| place.encode_int8(GpuPlace::kept(&kept(200)), &mut [0; 207]).is_ok())),
        ("decode", Box::new(|| place.decode_int8(&[0; 5], GpuPlace::kept_mut(&mut kept(2))).is_ok())),
        ("add", Box::new(|| place.add(GpuPlace::kept(&kept(3)), GpuPlace::kept_mut(&mut kept(2))).is_ok())),
        ("carry", Box::new(|| place.carry_on(GpuPlace::kept(&kept(3)), &mut kept(2)).is_ok())),
        (
            "residuals",
            Box::new(|| place.residuals(GpuPlace::kept(&kept(3)), Some(GpuPlace::kept(&kept(2))), 1).is_ok()),
        ),
        ("entries", Box::new(|| place.add_entries(&entries(2), GpuPlace::kept_mut(&mut kept(2))).is_ok())),
    ];
    for (name, call) in calls {
        assert!(catch_unwind(AssertUnwindSafe(call)).is_err(), "{name}");
    }
    place.add_entries(&entries(1), GpuPlace::kept_mut(&mut kept(2))).unwrap();
}

#[test]
fn a_place_that_fails_ends_the_migration_and_the_peer_learns_of_it() {
    let (elements, timeout) = (300, Duration::from_secs(20));
    // What fails varies; three steps do fewer things than 10,000.
    for asked in (0..60).chain([10_000]) {
        let network = LocalNetwork::new();
        let start = |rank, place: GpuPlace| {
            let shape = Shape { experts_per_rank: 1, expert_elements: vec![elements] };
            let (weights, gradients) = ("delta:0.1".parse().unwrap(), "topk:0.1".parse().unwrap());
            let settings = Settings { weights, gradients, timeout, ..Settings::default() };
            let domain = Domain::new(rank, &[Rank(0), Rank(1)]).unwrap();
            Migration::<f32, _>::new_in(place, domain, shape, settings, Box::new(network.carrier(rank)))
        };
        let step = |migration: &Migration<f32, GpuPlace>| -> Result<()> {
            let place = cpu();
            let numbers = place.keep(vec![0.5_f32; elements]).unwrap();
            let mut out = place.zeros::<f32>(elements).unwrap();
            migration.publish(0, GpuPlace::kept(&numbers))?;
            migration.gather(0, GpuPlace::kept_mut(&mut out))?;
            migration.send_gradients(0, GpuPlace::kept(&numbers))?;
            migration.reduce_gradients(0, GpuPlace::kept(&numbers), GpuPlace::kept_mut(&mut out))
        };
        let steps = |migration: &Migration<f32, GpuPlace>| (0..3).try_for_each(|_| step(migration));
        let fails = GpuPlace::of(Probe::new(asked, true));
        let Ok(zero) = start(Rank(0), fails) else { continue };
        let one = start(Rank(1), cpu()).unwrap();
        let (failed, other) = thread::scope(|scope| {
            let other = scope.spawn(|| steps(&one));
            (steps(&zero), other.join().unwrap())
        });
        if asked == 10_000 {
            assert_eq!((failed, other), (Ok(()), Ok(())));
            thread::scope(|scope| {
                scope.spawn(|| one.close());
                zero.close();
            });
            continue;
        }
        assert!(matches!(&failed, Err(ep::Error::Environment(_))), "{asked}: {failed:?}");
        assert_eq!(step(&zero), failed, "{asked}: it does not go on");
        // The peer may have done all its steps before.
        match other {
            Ok(()) => {}
            Err(ep::Error::Peer(peer)) => assert_eq!((peer.peer, peer.fault), (Rank(0), PeerFault::Failed)),
            Err(error) => panic!("{asked}: {error}"),
        }
    }
}
