//! An endpoint with its window, and the three calls that move bytes. No call here may run at the same time as another one of
//! the same endpoint; `engine` has the lock.

mod memory;
mod objects;
mod open;
mod steps;

use std::ptr;
use std::sync::Arc;

use ep::{EnvironmentError, Error, Result, Window};

use crate::blob::{self, Blob};
use crate::info::{Chosen, LOG_HINT};
use crate::library::Library;
use crate::nics::Bus;
use crate::sys;

use memory::Part;
pub(crate) use memory::try_gpu_memory;
use objects::{Contexts, Object, OpenDomain};

/// What the queue of completions delivered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    /// The put with this context is complete.
    Put(usize),
    /// The put with this context failed.
    Failed(usize, String),
    /// A peer's put has arrived, with this immediate.
    Arrived(u32),
}

/// A part of a peer's window.
#[derive(Debug, Clone, Copy, Default)]
struct RemotePart {
    key: u64,
    base: u64,
    len: usize,
}

/// Where a peer's window is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Remote {
    address: sys::Address,
    /// In order of their offsets. Parts that the window does not have are empty.
    parts: [RemotePart; Blob::MOST_PARTS],
}

impl Remote {
    /// The lengths of the window's parts, in order.
    pub(crate) fn lens(&self) -> impl Iterator<Item = usize> + '_ {
        self.parts.iter().map(|part| part.len)
    }
}

/// The part in which `len` bytes at an offset of a window lie, and the offset in that part. `lens` are those of the parts, in
/// order.
///
/// # Errors
/// The offset at which the part ends that has the first byte; the length of the window if none has it.
pub(crate) fn place(
    lens: impl Iterator<Item = usize>,
    offset: usize,
    len: usize,
) -> std::result::Result<(usize, usize), usize> {
    let mut start = 0;
    for (part, part_len) in lens.enumerate() {
        let within = offset - start;
        if within < part_len || (len == 0 && within == part_len) {
            return if len <= part_len - within { Ok((part, within)) } else { Err(start + part_len) };
        }
        start += part_len;
    }
    Err(start)
}

/// The fields are in the order in which they must be dropped.
pub(crate) struct Endpoint {
    /// In order of their offsets: the part in host memory, then that in the memory of a GPU.
    parts: Vec<Part>,
    endpoint: Object,
    addresses: Object,
    queue: Object,
    _domain: OpenDomain,
    contexts: Contexts,
    info: Chosen,
    library: Arc<Library>,
    /// Keeps the memory of the parts.
    _window: Arc<dyn Window>,
    provider: String,
    /// Contexts of puts come first, and then those of posted receives.
    puts: usize,
    /// Contexts of receives that have to be posted, where immediates need posted receives.
    unposted: Vec<usize>,
}

impl Endpoint {
    /// The CPUs near the NIC; empty if the provider or the machine does not tell.
    pub(crate) fn near_cpus(&self) -> Vec<usize> {
        let address = self.info.entry().pci_address();
        address.map(|address| Bus::of_this_machine().cpus(&address)).unwrap_or_default()
    }

    /// The provider's name.
    pub(crate) fn provider(&self) -> &str {
        &self.provider
    }

    /// Puts that may be in flight: their contexts are `0..puts`.
    pub(crate) fn puts(&self) -> usize {
        self.puts
    }

    /// The lengths of the parts of this rank's window, bytes.
    pub(crate) fn lens(&self) -> impl Iterator<Item = usize> + '_ {
        self.parts.iter().map(|part| part.len)
    }

    /// The text of an error of the library.
    pub(crate) fn text(&self, answer: isize) -> String {
        self.library.text(answer)
    }

    /// The error of a call after the endpoint was opened.
    pub(crate) fn error(&self, call: &str, answer: isize) -> Error {
        let what = format!("using provider {} of libfabric {}", self.provider, self.library.version());
        let hint = match -answer {
            sys::ENFILE | sys::EMFILE => "raise the limit of open files (ulimit -n)",
            _ => LOG_HINT,
        };
        EnvironmentError::new(what, format!("{call}: {}", self.library.text(answer)), hint).into()
    }

    /// What peers need to reach this rank's window.
    pub(crate) fn blob(&self) -> Result<Blob> {
        let endpoint = self.endpoint.as_ptr::<sys::Ep>();
        // SAFETY: an open endpoint of this kind has this table.
        let getname = unsafe { (*(*endpoint).cm).getname };
        let getname = getname.ok_or_else(|| self.error("fi_getname", -sys::ENOSYS))?;
        let mut address = vec![0u8; 512];
        let mut len = address.len();
        // SAFETY: the call writes at most `len` bytes, and the length that the address has.
        let answer =
            unsafe { getname(self.endpoint.as_ptr(), address.as_mut_ptr().cast(), &mut len) } as isize;
        if answer != 0 || len > address.len() {
            return Err(self.error("fi_getname", answer));
        }
        address.truncate(len);
        let part = |part: &Part| blob::Part { key: part.mr().key, base: part.base, len: part.len as u64 };
        let parts = self.parts.iter().map(part).collect();
        Ok(Blob { provider: self.provider.clone(), address, parts })
    }

    /// Adds a peer. `None` when the provider refuses its address.
    pub(crate) fn insert(&mut self, blob: &Blob) -> Option<Remote> {
        // The library reads as many bytes as an address of this provider has.
        let own = self.blob().ok()?.address.len();
        let mut parts = [RemotePart::default(); Blob::MOST_PARTS];
        for (part, &blob::Part { key, base, len }) in parts.iter_mut().zip(&blob.parts) {
            *part = RemotePart { key, base, len: usize::try_from(len).ok()? };
        }
        let text = self.info.entry().src_is_text();
        let complete = if text { blob.address.last() == Some(&0) } else { blob.address.len() == own };
        if !complete {
            return None;
        }
        let mut address = u64::MAX;
        // SAFETY: an open vector has this table. The address has the length of its format, or is a string that ends
        // with 0, as checked; the call stores one number.
        let inserted = unsafe {
            let vector = self.addresses.as_ptr::<sys::Av>();
            let insert = (*(*vector).ops).insert?;
            insert(vector, blob.address.as_ptr().cast(), 1, &mut address, 0, ptr::null_mut())
        };
        (inserted == 1).then_some(Remote { address, parts })
    }

    /// Posts a put of `len` bytes at `source`, with the context. The caller has checked the offsets. `Ok(false)`: the
    /// provider's queue is full, or its connection is not ready.
    pub(crate) fn write(
        &mut self,
        to: Remote,
        source: usize,
        destination: usize,
        len: usize,
        immediate: u32,
        context: usize,
    ) -> Result<bool, isize> {
        assert!(context < self.puts);
        let (Ok((own, source)), Ok((peer, destination))) =
            (place(self.lens(), source, len), place(to.lens(), destination, len))
        else {
            return Err(-sys::EINVAL);
        };
        let (own, peer) = (&self.parts[own], &to.parts[peer]);
        let endpoint = self.endpoint.as_ptr::<sys::Ep>();
        // SAFETY: the source is inside the registered part, whose memory outlives the endpoint. The context is not in use by
        // another operation. A descriptor is passed whether or not the provider needs it (`FI_MR_LOCAL`).
        let answer = unsafe {
            let writedata = (*(*endpoint).rma).writedata.ok_or(-sys::ENOSYS)?;
            let (from, desc) = (own.start.wrapping_add(source), own.mr().desc);
            let at = peer.base + destination as u64;
            let context = self.contexts.at(context);
            writedata(endpoint, from.cast(), len, desc, immediate.into(), to.address, at, peer.key, context)
        };
        match answer {
            0 => Ok(true),
            answer if answer == -sys::EAGAIN => Ok(false),
            answer => Err(answer),
        }
    }

    /// Posts receives, where the provider needs one for every immediate.
    fn post_receives(&mut self) -> Result<()> {
        while let Some(&context) = self.unposted.last() {
            let endpoint = self.endpoint.as_ptr::<sys::Ep>();
            // SAFETY: a receive of no bytes: only the immediate of a remote write consumes it. Nothing else uses its
            // context. The address means any sender.
            let answer = unsafe {
                let recv = (*(*endpoint).msg).recv;
                let recv = recv.ok_or_else(|| self.error("fi_recv", -sys::ENOSYS))?;
                let Part { start, .. } = self.parts[0];
                let desc = self.parts[0].mr().desc;
                recv(endpoint, start.cast(), 0, desc, u64::MAX, self.contexts.at(context))
            };
            match answer {
                0 => drop(self.unposted.pop()),
                // Posted again with the next progress.
                answer if answer == -sys::EAGAIN => break,
                answer => return Err(self.error("fi_recv", answer)),
            }
        }
        Ok(())
    }

    /// Makes progress and passes the completions on. Returns their number.
    pub(crate) fn progress(&mut self, on: &mut dyn FnMut(Completion)) -> Result<usize> {
        self.post_receives()?;
        let queue = self.queue.as_ptr::<sys::Cq>();
        // SAFETY: an open queue has this table.
        let ops = unsafe { &*(*queue).ops };
        let (Some(read), Some(readerr)) = (ops.read, ops.readerr) else {
            return Err(self.error("fi_cq_read", -sys::ENOSYS));
        };
        const MOST: usize = 32;
        let empty =
            sys::CqDataEntry { op_context: ptr::null_mut(), flags: 0, len: 0, buf: ptr::null_mut(), data: 0 };
        let mut entries = [empty; MOST];
        let mut total = 0;
        loop {
            // SAFETY: the queue's format is that of the entries, and there are `MOST` of them.
            let found = unsafe { read(queue, entries.as_mut_ptr().cast(), MOST) };
            if found == -sys::EAVAIL {
                // SAFETY: all bytes zero are a valid entry: null pointers and numbers.
                let mut entry: sys::CqErrEntry = unsafe { std::mem::zeroed() };
                // SAFETY: the entry lives during the call; without room for its data, the provider keeps the data.
                let found = unsafe { readerr(queue, &mut entry, 0) };
                match found {
                    1 => {
                        total += 1;
                        self.failed(&entry, on)?;
                        continue;
                    }
                    // The next call reads it. Another turn here might find the same state for ever, under the lock.
                    0 => return Ok(total),
                    again if again == -sys::EAGAIN => return Ok(total),
                    answer => return Err(self.error("fi_cq_readerr", answer)),
                }
            }
            if found == 0 || found == -sys::EAGAIN {
                return Ok(total);
            }
            if found < 0 || found as usize > MOST {
                return Err(self.error("fi_cq_read", found.min(0)));
            }
            let found = found as usize;
            total += found;
            for entry in &entries[..found] {
                self.completed(entry, on)?;
            }
            self.post_receives()?;
            if found < MOST {
                return Ok(total);
            }
        }
    }

    fn completed(&mut self, entry: &sys::CqDataEntry, on: &mut dyn FnMut(Completion)) -> Result<()> {
        let context = self.contexts.index(entry.op_context);
        if let Some(receive) = context.filter(|&context| context >= self.puts) {
            self.unposted.push(receive);
        }
        // A provider may mark a remote completion by this flag only.
        if entry.flags & sys::REMOTE_CQ_DATA != 0 {
            on(Completion::Arrived(entry.data as u32));
            return Ok(());
        }
        match context {
            Some(put) if put < self.puts => on(Completion::Put(put)),
            _ => {
                let problem = format!("a completion of no operation (flags {:#x})", entry.flags);
                let what =
                    format!("using provider {} of libfabric {}", self.provider, self.library.version());
                return Err(EnvironmentError::new(what, format!("fi_cq_read: {problem}"), LOG_HINT).into());
            }
        }
        Ok(())
    }

    fn failed(&mut self, entry: &sys::CqErrEntry, on: &mut dyn FnMut(Completion)) -> Result<()> {
        if is_shortage(entry.err as isize) {
            return Err(self.error("fi_cq_readerr", -(entry.err as isize)));
        }
        let text = self.library.text(entry.err as isize);
        match self.contexts.index(entry.op_context) {
            Some(put) if put < self.puts => on(Completion::Failed(put, text)),
            // A receive that failed, or an error of no operation of ours, such as a peer's connection that ended. Puts
            // to that peer fail by themselves.
            Some(receive) => self.unposted.push(receive),
            None => {}
        }
        Ok(())
    }
}

/// Whether an error says that this process lacks a resource, which is no peer's fault.
pub(crate) fn is_shortage(error: isize) -> bool {
    [sys::ENOMEM, sys::ENFILE, sys::EMFILE, sys::ENOBUFS].contains(&error)
}
