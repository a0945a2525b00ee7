//! Beams: sequences of one request that are admitted, preempted and advanced together.

use super::sequence::{NewSequence, SeqId};
use super::{AdmissionError, Group, GroupId, GroupKind, Policy, Scheduler};

impl Scheduler {
    /// Adds a request that keeps `width` beams. It starts as one sequence, which counts for
    /// `width` seats; refused where all beams at their longest may not fit the pool.
    pub fn add_beams(&mut self, new: NewSequence, width: usize) -> Result<SeqId, AdmissionError> {
        self.check_length(&new)?;
        if self.config.policy == Policy::Static {
            return Err(AdmissionError::StaticBeams);
        }
        let limits = [
            (self.config.max_num_seqs, "max_num_seqs"),
            (self.config.max_num_batched_tokens, "max_num_batched_tokens"),
        ];
        if let Some(&(limit, name)) = limits.iter().find(|(limit, _)| width > *limit) {
            return Err(AdmissionError::BeamsTooWide { width, limit, name });
        }
        let (prompt, max_tokens) = (new.prompt.len(), new.rules.max_tokens.max(1));
        // Only the full blocks of the prompt are certain to be shared; one more a beam is held
        // while the block it shares is copied.
        let block_size = self.config.block_size;
        let shared = prompt / block_size;
        let own = (prompt + max_tokens).div_ceil(block_size) - shared;
        let needed = shared.saturating_add(width.saturating_mul(own));
        if needed > self.config.num_blocks {
            let limit = self.config.num_blocks;
            return Err(AdmissionError::BeamsTooLong { prompt, width, max_tokens, needed, limit });
        }
        // A beam's next token is known only when the beams have been compared.
        let id = self.insert(NewSequence { needs_history: true, ..new });
        let group = GroupId(self.seqs.get(id).arrival);
        self.seqs.get_mut(id).group = Some(group);
        let kind = GroupKind::Beams { width };
        self.groups.insert(group, Group { members: vec![id], kind });
        self.enqueue(id);
        Ok(id)
    }

    /// The live beams of the request that `id` belongs to, in order.
    pub fn beams_of(&self, id: SeqId) -> &[SeqId] {
        let group = self.beams(id).expect("a beam");
        &self.groups[&group].members
    }

    /// Whether every beam of `id`'s request has been sampled by steps that are updated, and waits
    /// for [`Scheduler::advance_beams`].
    pub fn beams_are_parked(&self, id: SeqId) -> bool {
        let under_way = |id| self.in_flight.iter().any(|step| step.seqs.contains(id));
        self.beams_of(id).iter().all(|id| self.seqs.get(*id).num_pending > 0 && !under_way(id))
    }

    /// Replaces the parked beams of `id`'s request by the continuations `next` (place of the
    /// beam continued, token), at most as many as its width, and returns the beams there are
    /// now, in order. Continuations of one beam share its blocks.
    pub fn advance_beams(&mut self, id: SeqId, next: &[(usize, u32)]) -> Vec<SeqId> {
        assert!(self.beams_are_parked(id), "beams advance together");
        let group_id = self.beams(id).expect("a beam");
        let group = &self.groups[&group_id];
        let GroupKind::Beams { width } = group.kind else { unreachable!("beams") };
        assert!((1..=width).contains(&next.len()), "{} of {width} beams", next.len());
        let members = group.members.clone();
        let parents: Vec<_> = members.iter().map(|&m| self.seqs.get(m).clone()).collect();
        let mut beams = Vec::with_capacity(next.len());
        for (i, &(parent, token)) in next.iter().enumerate() {
            let mut seq = parents[parent].clone();
            seq.tokens.push(token);
            seq.num_pending = 0;
            seq.waits_for = None;
            for &block in seq.table.blocks() {
                self.pool.retain(block);
            }
            let id = match members.get(i) {
                Some(&id) => {
                    *self.seqs.get_mut(id) = seq;
                    id
                }
                None => {
                    self.reserved_seats -= 1;
                    let id = self.seqs.insert(seq);
                    self.seat(id);
                    id
                }
            };
            beams.push(id);
        }
        for &id in members.iter().skip(next.len()) {
            self.seqs.remove(id);
            self.running.retain(|&r| r != id);
            self.reserved_seats += 1;
        }
        for mut parent in parents {
            self.pool.release_all(&mut parent.table.split_off(0));
        }
        self.stats.num_forks += (next.len() as u64).saturating_sub(members.len() as u64);
        self.groups.get_mut(&group_id).expect("just seen").members = beams.clone();
        beams
    }
}
