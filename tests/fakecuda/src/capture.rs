//! Stream capture and graphs.
//!
//! A capture collects the work of the stream it began in and of every stream that joins it by
//! waiting for one of its events. Each piece of work depends on what its stream did before and on
//! what its stream has waited for. Pointers and arguments are taken when the work is captured; page-
//! locked memory is read and written when the graph runs.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use crate::code::{self, Code, Result};
use crate::config::Order;
use crate::driver::Driver;
use crate::work::Work;

/// Which calls a capture forbids, on which threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

#[derive(Debug)]
struct Node {
    work: Work,
    /// Nodes before it that it needs.
    after: Vec<usize>,
}

/// A capture under way.
#[derive(Debug)]
pub(crate) struct Capture {
    pub device: usize,
    origin: u64,
    mode: Mode,
    thread: ThreadId,
    nodes: Vec<Node>,
    /// The nodes that the next piece of work of each stream in it depends on.
    tails: HashMap<u64, Vec<usize>>,
    /// Something was done that a capture does not allow.
    invalid: bool,
}

/// What an event in a capture stands for.
#[derive(Clone, Debug)]
pub(crate) struct CapturedEvent {
    capture: u64,
    nodes: Vec<usize>,
}

/// Work in an order in which it can run.
#[derive(Debug)]
pub(crate) struct Graph {
    pub device: usize,
    pub works: Arc<[Work]>,
}

impl Driver {
    pub fn begin_capture(&mut self, stream: u64, mode: Mode) -> Result {
        let device = self.streams[&stream].device;
        if stream == self.devices[device].default_stream {
            return Err(code::STREAM_CAPTURE_UNSUPPORTED);
        }
        if self.streams[&stream].capture.is_some() {
            return Err(code::ILLEGAL_STATE);
        }
        let capture = Capture {
            device,
            origin: stream,
            mode,
            thread: thread::current().id(),
            nodes: Vec::new(),
            tails: HashMap::from([(stream, Vec::new())]),
            invalid: false,
        };
        let handle = self.new_handle();
        self.captures.insert(handle, capture);
        self.join(stream, handle);
        Ok(())
    }

    fn join(&mut self, stream: u64, capture: u64) {
        self.streams.get_mut(&stream).expect("a live stream").capture = Some(capture);
    }

    /// The handle of the graph.
    pub fn end_capture(&mut self, stream: u64) -> Result<u64> {
        let handle = self.streams[&stream].capture.ok_or(code::ILLEGAL_STATE)?;
        let capture = &self.captures[&handle];
        if capture.origin != stream {
            self.invalidate(handle);
            return Err(code::STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != Mode::Relaxed && capture.thread != thread::current().id() {
            return Err(code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let capture = self.captures.remove(&handle).expect("looked up above");
        for stream in self.streams.values_mut().filter(|s| s.capture == Some(handle)) {
            stream.capture = None;
        }
        if capture.invalid {
            return Err(code::STREAM_CAPTURE_INVALIDATED);
        }
        if !capture.is_joined() {
            return Err(code::STREAM_CAPTURE_UNJOINED);
        }
        let device = capture.device;
        let works = capture.in_order(self.config.order).into();
        let graph = self.new_handle();
        self.graphs.insert(graph, Graph { device, works });
        Ok(graph)
    }

    pub fn instantiate(&mut self, graph: u64, device: usize) -> Result<u64> {
        let found = self.graphs.get(&graph).filter(|found| found.device == device);
        let works = found.ok_or(code::INVALID_VALUE)?.works.clone();
        let handle = self.new_handle();
        self.executables.insert(handle, Graph { device, works });
        Ok(handle)
    }

    /// Nothing more can become of a capture.
    pub fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.invalid = true;
        }
    }

    pub fn is_invalid(&self, capture: u64) -> bool {
        self.captures.get(&capture).is_some_and(|capture| capture.invalid)
    }

    /// Ends a capture's hopes with `code`.
    fn refuse<T>(&mut self, capture: u64, code: Code) -> Result<T> {
        self.invalidate(capture);
        Err(code)
    }

    /// For a call that a capture under way may forbid, whatever stream it is about.
    pub fn check_captures(&mut self) -> Result {
        let this = thread::current().id();
        let forbids = |capture: &Capture| match capture.mode {
            Mode::Global => true,
            Mode::ThreadLocal => capture.thread == this,
            Mode::Relaxed => false,
        };
        let found = self.captures.iter().find(|(_, capture)| forbids(capture));
        match found.map(|(&handle, _)| handle) {
            Some(handle) => self.refuse(handle, code::STREAM_CAPTURE_UNSUPPORTED),
            None => Ok(()),
        }
    }

    /// For a call that no stream in a capture allows, such as waiting for it.
    pub fn check_not_capturing(&mut self, stream: u64) -> Result {
        match self.streams[&stream].capture {
            Some(capture) => self.refuse(capture, code::STREAM_CAPTURE_UNSUPPORTED),
            None => self.check_captures(),
        }
    }

    /// For a call that waits for an event or asks about it.
    pub fn check_not_captured(&mut self, event: u64) -> Result {
        match self.events[&event].captured.as_ref().map(|captured| captured.capture) {
            Some(capture) => self.refuse(capture, code::CAPTURED_EVENT),
            None => self.check_captures(),
        }
    }

    /// Work in the default stream would have to wait for blocking streams that are in a capture.
    pub fn check_implicit_dependency(&mut self, stream: u64) -> Result {
        let device = self.streams[&stream].device;
        if self.captures.is_empty() || stream != self.devices[device].default_stream {
            return Ok(());
        }
        let mut streams = self.streams.values();
        let found = streams.find(|s| s.device == device && s.blocking && s.capture.is_some());
        match found.and_then(|found| found.capture) {
            Some(capture) => self.refuse(capture, code::STREAM_CAPTURE_IMPLICIT),
            None => Ok(()),
        }
    }

    /// Adds work of a stream that is in the capture.
    pub fn capture_work(&mut self, handle: u64, stream: u64, work: Work) -> Result {
        let allowed = match &work {
            Work::Kernel(_) | Work::Matmul(_) => true,
            Work::CopyOut { .. } | Work::Copy { .. } | Work::Fill { .. } => true,
            Work::CopyIn { from, .. } => matches!(from, crate::work::Source::Pinned(_)),
            Work::Free { .. } | Work::Record { .. } | Work::Wait(_) | Work::Graph(_) => false,
        };
        let capture = self.valid_capture(handle)?;
        if !allowed {
            return self.refuse(handle, code::STREAM_CAPTURE_UNSUPPORTED);
        }
        let node = capture.nodes.len();
        let tail = capture.tails.get_mut(&stream).expect("the stream is in it");
        let after = std::mem::replace(tail, vec![node]);
        capture.nodes.push(Node { work, after });
        Ok(())
    }

    fn valid_capture(&mut self, handle: u64) -> Result<&mut Capture> {
        let capture = self.captures.get_mut(&handle).expect("a stream is in it");
        if capture.invalid { Err(code::STREAM_CAPTURE_INVALIDATED) } else { Ok(capture) }
    }

    /// An event stands for what its stream depends on in the capture.
    pub fn capture_record(&mut self, handle: u64, stream: u64, event: u64) -> Result {
        let nodes = self.valid_capture(handle)?.tails[&stream].clone();
        let event = self.events.get_mut(&event).expect("the caller has looked it up");
        event.captured = Some(CapturedEvent { capture: handle, nodes });
        Ok(())
    }

    /// A wait between a stream and an event, one of which is in a capture.
    pub fn capture_wait(&mut self, stream: u64, event: u64) -> Result {
        let captured = self.events[&event].captured.clone();
        let own = self.streams[&stream].capture;
        let Some(CapturedEvent { capture, nodes }) = captured else {
            let own = own.expect("else nothing is in a capture");
            self.valid_capture(own)?;
            return self.refuse(own, code::STREAM_CAPTURE_ISOLATION);
        };
        if !self.captures.contains_key(&capture) {
            // The capture of the event has ended.
            own.into_iter().for_each(|own| self.invalidate(own));
            return Err(code::STREAM_CAPTURE_ISOLATION);
        }
        if own.is_some_and(|own| own != capture) {
            own.into_iter().for_each(|own| self.invalidate(own));
            return self.refuse(capture, code::STREAM_CAPTURE_MERGE);
        }
        let tails = &mut self.valid_capture(capture)?.tails;
        let tail = tails.entry(stream).or_default();
        tail.extend(nodes);
        tail.sort_unstable();
        tail.dedup();
        self.join(stream, capture);
        Ok(())
    }
}

impl Capture {
    /// Whether the origin depends on all work of the other streams.
    fn is_joined(&self) -> bool {
        let mut reached = vec![false; self.nodes.len()];
        let mut open = self.tails[&self.origin].clone();
        while let Some(node) = open.pop() {
            if !std::mem::replace(&mut reached[node], true) {
                open.extend(&self.nodes[node].after);
            }
        }
        reached.into_iter().all(|reached| reached)
    }

    /// The work, each piece after what it depends on. The lazy order puts what was captured last as
    /// early as that allows, so that a missing dependency shows.
    fn in_order(self, order: Order) -> Vec<Work> {
        let mut left: Vec<Option<Node>> = self.nodes.into_iter().map(Some).collect();
        let mut works = Vec::with_capacity(left.len());
        while works.len() < left.len() {
            let ready = |node: &Option<Node>| {
                let after = node.as_ref().map(|node| &node.after);
                after.is_some_and(|after| after.iter().all(|&before| left[before].is_none()))
            };
            let next = match order {
                Order::Eager => left.iter().position(ready),
                Order::Lazy => left.iter().rposition(ready),
            };
            let next = next.expect("a node depends on earlier ones alone");
            works.extend(left[next].take().map(|node| node.work));
        }
        works
    }
}
