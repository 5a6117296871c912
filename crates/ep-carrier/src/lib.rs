//! Carries the messages of [`ep_migrate`] between threads, processes and machines, over the engines of rails.
//!
//! [`RailCarrier`] is a [`Carrier`](ep_migrate::Carrier). Its ranks are threads ([`RailCarrier::threads`]) or processes
//! (`RailCarrier::join`, on Linux), and `config.host.transport` selects the engine: `loopback` and emulated links on one
//! machine, a provider of libfabric between machines. `docs/migration.md` says when to use it.
//!
//! ```
//! use ep::{Config, Rank};
//! use ep_carrier::RailCarrier;
//! use ep_migrate::{Carrier, Lane};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let carriers = RailCarrier::threads(&[Rank(1), Rank(4)], &Config::default())?;
//! carriers[0].send(Rank(4), Lane::Headers, b"hello".to_vec().into())?;
//! assert_eq!(carriers[1].receive(Rank(1), Lane::Headers, 8)?.wait(5)?, b"hello");
//! # Ok(())
//! # }
//! ```
//!
//! | module | content |
//! |---|---|
//! | `carrier` | [`RailCarrier`]: leaves orders for its thread |
//! | `pump` | the thread: orders, slots, the ends of connections |
//! | `outgoing`, `incoming` | messages to and from one peer, without slots |
//! | `part` | the bytes in a slot |
//! | `transfer` | what a caller waits for |
//! | `join` | how the ranks meet |
//! | `ends`, `links` | which peers are gone |
//!
//! From one rank to another:
//!
//! ```text
//!  caller        thread of the sender                 thread of the receiver       caller
//!
//!                                     ◀── posted ──── takes the order ◀──────────  receive
//!  send ───────▶ takes the order
//!                part of the message ═══▶ slot ═════▶ adds it to the message
//!                slot is free again  ◀── credit ─────┘
//!                ...                                  the last part ────────────▶  wait returns
//!  wait returns ◀── credit of the last part
//! ```
//!
//! A message is sent after its receive was posted, so a rank needs memory only for receives that it has posted, and takes
//! every part at once. So slots never wait for a caller, and lanes do not wait for each other.

mod carrier;
mod ends;
mod incoming;
mod join;
#[cfg(target_os = "linux")]
mod links;
mod outgoing;
mod part;
mod pump;
#[cfg(test)]
mod tests;
mod transfer;

pub use carrier::RailCarrier;
