//! What steps produce, gathered in buffers that are used again and again.

use super::Completion;
use crate::wire::Endpoint;

/// Datagrams to send, and requests that are over. One output may gather those of many steps.
#[derive(Debug, Default)]
pub struct Output {
    bytes: Vec<u8>,
    /// Where each datagram goes, and where it ends in `bytes`.
    ends: Vec<(Endpoint, usize)>,
    /// Requests that are over, in the order in which they ended.
    pub completions: Vec<Completion>,
}

impl Output {
    /// Datagrams gathered so far and where they go, in the order in which they are to be sent.
    pub fn datagrams(&self) -> impl ExactSizeIterator<Item = (Endpoint, &[u8])> {
        (0..self.ends.len()).map(|i| self.datagram(i))
    }

    /// How many datagrams are gathered.
    pub fn datagram_count(&self) -> usize {
        self.ends.len()
    }

    /// One of them, and where it goes.
    ///
    /// # Panics
    /// If `index` is not below [`Output::datagram_count`].
    pub fn datagram(&self, index: usize) -> (Endpoint, &[u8]) {
        let start = if index == 0 { 0 } else { self.ends[index - 1].1 };
        let (to, end) = self.ends[index];
        (to, &self.bytes[start..end])
    }

    /// Forgets the datagrams, keeping their room.
    pub fn clear_datagrams(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }

    pub(super) fn send(&mut self, to: Endpoint, datagram: &[u8]) {
        self.bytes.extend_from_slice(datagram);
        self.ends.push((to, self.bytes.len()));
    }
}
