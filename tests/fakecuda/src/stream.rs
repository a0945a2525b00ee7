//! Streams, events, and when their work runs.
//!
//! A stream is a queue. In the lazy order a piece of work runs when something waits for it: first
//! what stands before it in its own stream, and of other streams only what a wait between them asks
//! for.
//!
//! ```text
//! stream A   copy ─ record e ─ kernel          synchronize(B) runs: A.copy, A.record, B.wait,
//! stream B   wait e ─ kernel                                        B.kernel; A.kernel stays
//! ```

use std::collections::VecDeque;

use crate::capture::CapturedEvent;
use crate::code::{self, Result};
use crate::config::Order;
use crate::driver::Driver;
use crate::work::{Ticket, Work};

/// A queue of work.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub device: usize,
    /// Waits for the default stream, and the default stream for it.
    pub blocking: bool,
    /// What has not run yet, oldest first.
    pub queue: VecDeque<Work>,
    /// Pieces of work ever put into it.
    pub enqueued: u64,
    /// The capture that takes its work.
    pub capture: Option<u64>,
    /// The program has let go of it; its work still runs.
    pub destroyed: bool,
}

impl Stream {
    /// Pieces of work that have run.
    fn done(&self) -> u64 {
        self.enqueued - self.queue.len() as u64
    }
}

/// A place in some stream.
#[derive(Debug, Default)]
pub(crate) struct Event {
    pub device: usize,
    pub timing: bool,
    /// The latest record.
    pub recorded: Option<Ticket>,
    /// When that happened, in microseconds.
    pub time: Option<u64>,
    /// Set where the latest record was in a capture.
    pub captured: Option<CapturedEvent>,
}

impl Driver {
    pub fn add_stream(&mut self, device: usize, blocking: bool) -> u64 {
        let handle = self.new_handle();
        self.streams.insert(handle, Stream { device, blocking, ..Stream::default() });
        handle
    }

    /// The stream that a handle of the program means, on the device that is current.
    pub fn stream(&self, handle: u64, device: usize) -> Result<u64> {
        // 0 and CU_STREAM_LEGACY are the default stream; CU_STREAM_PER_THREAD is not built.
        let handle = match handle {
            0 | 1 => self.devices[device].default_stream,
            2 => return Err(code::NOT_SUPPORTED),
            other => other,
        };
        let found = self.streams.get(&handle).filter(|s| s.device == device && !s.destroyed);
        found.map(|_| handle).ok_or(code::INVALID_HANDLE)
    }

    /// The program lets go of a stream.
    pub fn destroy_stream(&mut self, handle: u64) -> Result {
        if self.devices.iter().any(|device| device.default_stream == handle) {
            return Err(code::INVALID_VALUE);
        }
        if let Some(capture) = self.streams[&handle].capture {
            self.invalidate(capture);
        }
        let stream = self.streams.get_mut(&handle).ok_or(code::INVALID_HANDLE)?;
        stream.destroyed = true;
        if stream.queue.is_empty() {
            self.streams.remove(&handle);
        }
        Ok(())
    }

    /// The end of what was put into a stream.
    pub fn tail(&self, stream: u64) -> Ticket {
        Ticket { stream, end: self.streams[&stream].enqueued }
    }

    pub fn is_done(&self, ticket: Ticket) -> bool {
        self.streams.get(&ticket.stream).is_none_or(|stream| stream.done() >= ticket.end)
    }

    /// Puts work into a stream, or into the capture that the stream is in.
    pub fn submit(&mut self, stream: u64, work: Work) -> Result {
        if let Some(capture) = self.streams[&stream].capture {
            return self.capture_work(capture, stream, work);
        }
        self.check_implicit_dependency(stream)?;
        if self.config.null {
            return self.run(stream, work);
        }
        for ticket in self.implicit_dependencies(stream) {
            self.enqueue(stream, Work::Wait(ticket));
        }
        self.enqueue(stream, work);
        if self.config.order == Order::Eager {
            self.run_to(self.tail(stream));
        }
        Ok(())
    }

    pub fn enqueue(&mut self, stream: u64, work: Work) {
        let stream = self.streams.get_mut(&stream).expect("a live stream");
        stream.enqueued += 1;
        stream.queue.push_back(work);
    }

    /// What work in this stream waits for without being told: the default stream waits for all
    /// blocking streams, and they for it.
    fn implicit_dependencies(&self, stream: u64) -> Vec<Ticket> {
        let Stream { device, blocking, .. } = self.streams[&stream];
        let default = self.devices[device].default_stream;
        let waits_for = |other: u64| other != stream && (stream == default || other == default);
        let busy = |stream: &Stream| {
            blocking && stream.blocking && stream.device == device && !stream.queue.is_empty()
        };
        let others = self.streams.iter().filter(|(other, s)| waits_for(**other) && busy(s));
        others.map(|(&other, _)| self.tail(other)).collect()
    }

    /// Runs what must have run for the ticket to be done, and nothing else.
    pub fn run_to(&mut self, ticket: Ticket) {
        // Each ticket waits for the next one; a wait is always for something older.
        let mut wanted = vec![ticket];
        while let Some(&Ticket { stream, .. }) = wanted.last() {
            if self.is_done(wanted[wanted.len() - 1]) {
                wanted.pop();
                continue;
            }
            match self.streams[&stream].queue.front() {
                Some(&Work::Wait(other)) if !self.is_done(other) => wanted.push(other),
                _ => self.run_next(stream),
            }
        }
    }

    /// Runs the oldest piece of work of a stream that has one.
    fn run_next(&mut self, stream: u64) {
        let state = self.streams.get_mut(&stream).expect("it has work, so it is there");
        let work = state.queue.pop_front().expect("it has work");
        let device = state.device;
        if let Err(code) = self.run(stream, work) {
            self.lose(device, code);
        }
        if self.streams[&stream].destroyed && self.streams[&stream].queue.is_empty() {
            self.streams.remove(&stream);
        }
    }

    /// Runs all work of a device.
    pub fn run_all(&mut self, device: usize) {
        let mut streams: Vec<u64> =
            self.streams.iter().filter(|(_, s)| s.device == device).map(|(&s, _)| s).collect();
        streams.sort_unstable();
        for stream in streams {
            if self.streams.contains_key(&stream) {
                self.run_to(self.tail(stream));
            }
        }
    }

    /// Success where the ticket is done. Else the answer is "not ready", once: what was asked for
    /// runs, so that a loop that asks again ends.
    pub fn query(&mut self, ticket: Ticket) -> Result {
        if self.is_done(ticket) {
            return Ok(());
        }
        self.run_to(ticket);
        Err(code::NOT_READY)
    }

    /// Runs work to the end as a call that returns when it is done.
    pub fn submit_and_wait(&mut self, stream: u64, work: Work) -> Result {
        let device = self.streams[&stream].device;
        self.submit(stream, work)?;
        self.run_to(self.tail(stream));
        self.devices[device].lost.map_or(Ok(()), Err)
    }

    pub fn event(&mut self, handle: u64, device: usize) -> Result<&mut Event> {
        let event = self.events.get_mut(&handle).filter(|event| event.device == device);
        event.ok_or(code::INVALID_HANDLE)
    }

    pub fn record(&mut self, event: u64, stream: u64) -> Result {
        if let Some(capture) = self.streams[&stream].capture {
            return self.capture_record(capture, stream, event);
        }
        self.submit(stream, Work::Record { event })?;
        let ticket = self.tail(stream);
        let now = self.is_done(ticket).then_some(self.clock);
        let event = self.events.get_mut(&event).expect("the caller has looked it up");
        (event.recorded, event.captured, event.time) = (Some(ticket), None, now);
        Ok(())
    }

    pub fn wait_event(&mut self, stream: u64, event: u64) -> Result {
        let found = &self.events[&event];
        if self.streams[&stream].capture.is_some() || found.captured.is_some() {
            return self.capture_wait(stream, event);
        }
        match found.recorded {
            Some(ticket) if !self.is_done(ticket) => self.submit(stream, Work::Wait(ticket)),
            _ => Ok(()),
        }
    }
}
