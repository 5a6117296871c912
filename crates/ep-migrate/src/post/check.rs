//! What a correct peer can announce in a header.

use ep::Result;

use super::Post;
use crate::header::{Header, Kind};
use crate::inbox::{GRADIENTS, WEIGHTS, noun};

impl Post {
    /// Checks that a correct peer could have sent this header.
    pub(super) fn check(&self, peer: usize, header: &Header) -> Result<()> {
        self.check_header(peer, header).map_err(|found| self.broken(peer, found))
    }

    /// Like [`check`](Self::check), but the error is the text that says what is wrong with the header.
    fn check_header(&self, peer: usize, header: &Header) -> Result<(), String> {
        if header.sender != self.peer(peer) {
            return Err(format!("a message with rank {} as its sender", header.sender));
        }
        if header.run != self.setup.run {
            return Err(format!("a message of run {:#x}; this run is {:#x}", header.run, self.setup.run));
        }
        let lane = match header.kind {
            Kind::Weights | Kind::Resent => WEIGHTS,
            Kind::Gradients => GRADIENTS,
            _ if header.bytes != 0 => return Err("a body where none belongs".into()),
            Kind::Request if header.layer as usize >= self.setup.longest[WEIGHTS].len() => {
                return Err(format!("a request for layer {}", header.layer));
            }
            Kind::Request | Kind::Left | Kind::Failure(..) | Kind::Ask | Kind::Alive(_) => return Ok(()),
        };
        self.check_body(lane, header)?;
        self.check_step(peer, lane, header)
    }

    /// Checks the layer, length, and streams of a body.
    fn check_body(&self, lane: usize, header: &Header) -> Result<(), String> {
        let &Header { layer, bytes, streams, .. } = header;
        let (what, regular) = (noun(lane), self.setup.windows[lane].regular);
        if header.regular != regular {
            return Err(format!(
                "{what} of which a regular body has at most {} bytes there and {regular} here: the ranks have different \
                 models or settings",
                header.regular
            ));
        }
        let layers = self.setup.longest[lane].len();
        let Some(&longest) = self.setup.longest[lane].get(layer as usize) else {
            return Err(format!("{what} of layer {layer}; there are {layers} layers"));
        };
        if bytes == 0 || bytes > longest {
            return Err(format!("{what} of {bytes} bytes for layer {layer}; at most {longest} are possible"));
        }
        // A message has one stream of the codec for each expert. In the first message after a restart, a stream with
        // the weights that it changes comes before it.
        let most = if header.kind == Kind::Weights { 2 } else { 1 };
        if !(1..=most).contains(&streams) {
            return Err(format!("{streams} streams of each expert; at most {most} are possible"));
        }
        Ok(())
    }

    /// Checks that the step of a body is due, and records the step after it.
    fn check_step(&self, peer: usize, lane: usize, header: &Header) -> Result<(), String> {
        let (what, &Header { layer, step, .. }) = (noun(lane), header);
        let mut state = self.lock();
        let inbox = &mut state.peers[peer].lanes[lane];
        let next = &mut inbox.next_step[layer as usize];
        // Gradients may skip steps without a backward pass; weights are sent in every step.
        let is_next = match header.kind {
            Kind::Resent => step < *next,
            Kind::Gradients => step >= *next,
            _ => step == *next,
        };
        if !is_next {
            return Err(format!("{what} of layer {layer}, step {step}, where step {next} was due"));
        }
        if header.kind != Kind::Resent {
            *next = step.checked_add(1).ok_or_else(|| {
                format!("{what} of layer {layer}, step {step}, after which no step is possible")
            })?;
        }
        inbox.agrees = true;
        Ok(())
    }
}
