//! The library and its commands over real sockets, against a shard in a thread that can be made to misbehave.

mod commands;
mod library;
mod support;
