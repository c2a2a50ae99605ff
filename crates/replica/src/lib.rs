//! The replica: versioned store behind batched UDP sockets.
