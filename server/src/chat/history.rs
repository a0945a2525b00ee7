//! What has been said, and how much of it fits the context.

use quire_engine::text::chat::ChatMessage;

/// A conversation: at most one system message, then turns.
#[derive(Debug)]
pub struct History {
    /// What the model is told before everything else.
    pub system: Option<String>,
    /// Oldest first.
    turns: Vec<Turn>,
}

#[derive(Debug)]
struct Turn {
    user: String,
    /// `None` until there is one.
    answer: Option<String>,
}

/// A prompt that leaves room for an answer.
#[derive(Debug, PartialEq)]
pub struct Fitted {
    /// Its ids.
    pub prompt: Vec<u32>,
    /// Oldest turns that it leaves out.
    pub left_out: usize,
}

impl History {
    /// No turns yet.
    pub fn new(system: Option<String>) -> Self {
        History { system, turns: Vec::new() }
    }

    /// Begins a turn.
    pub fn ask(&mut self, text: String) {
        self.turns.push(Turn { user: text, answer: None });
    }

    /// Ends the last turn with the answer `text`.
    pub fn answer(&mut self, text: String) {
        self.turns.last_mut().expect("a turn that was begun").answer = Some(text);
    }

    /// Takes back the last turn, which got no answer.
    pub fn take_back(&mut self) {
        self.turns.pop();
    }

    /// Forgets the last answer; false: there is no turn.
    pub fn retry(&mut self) -> bool {
        self.turns.last_mut().map(|turn| turn.answer = None).is_some()
    }

    /// Forgets all turns.
    pub fn clear(&mut self) {
        self.turns.clear();
    }

    /// Forgets the `count` oldest turns.
    pub fn forget(&mut self, count: usize) {
        self.turns.drain(..count);
    }

    /// The prompt of as many of the last turns as have at most `limit` tokens; of the last turn
    /// alone whatever it has.
    ///
    /// # Errors
    /// Those of `encode`, which makes a prompt of messages.
    pub fn fit<E>(
        &self,
        limit: usize,
        encode: impl Fn(&[ChatMessage]) -> Result<Vec<u32>, E>,
    ) -> Result<Fitted, E> {
        let mut left_out = 0;
        loop {
            let prompt = encode(&self.messages(left_out))?;
            if prompt.len() <= limit || left_out + 1 >= self.turns.len() {
                return Ok(Fitted { prompt, left_out });
            }
            left_out += 1;
        }
    }

    /// The messages without the `left_out` oldest turns.
    fn messages(&self, left_out: usize) -> Vec<ChatMessage> {
        let system = self.system.iter().map(|text| ChatMessage::new("system", text));
        let turns = self.turns[left_out..].iter().flat_map(|turn| {
            let answer = turn.answer.iter().map(|text| ChatMessage::new("assistant", text));
            std::iter::once(ChatMessage::new("user", &turn.user)).chain(answer)
        });
        system.chain(turns).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quire_engine::text::chat::Content;
    use std::convert::Infallible;

    /// One token a byte.
    fn encode(messages: &[ChatMessage]) -> Result<Vec<u32>, Infallible> {
        let texts = messages.iter().map(|message| match &message.content {
            Content::Text(text) => text.as_str(),
            Content::Null => "",
        });
        Ok(texts.flat_map(str::bytes).map(u32::from).collect())
    }

    fn prompt(history: &History, limit: usize) -> (String, usize) {
        let Fitted { prompt, left_out } = history.fit(limit, encode).unwrap();
        (prompt.into_iter().filter_map(char::from_u32).collect(), left_out)
    }

    #[test]
    fn the_oldest_turns_are_left_out_and_the_system_message_stays() {
        let mut history = History::new(Some("S".to_owned()));
        for (user, answer) in [("aa", "bb"), ("cc", "dd")] {
            history.ask(user.to_owned());
            history.answer(answer.to_owned());
        }
        history.ask("ee".to_owned());
        for (limit, expected) in [
            (11, ("Saabbccddee", 0)),
            (10, ("Sccddee", 1)),
            (7, ("Sccddee", 1)),
            (6, ("See", 2)),
            (0, ("See", 2)),
        ] {
            assert_eq!(prompt(&history, limit), (expected.0.to_owned(), expected.1), "{limit}");
        }
        history.forget(1);
        assert_eq!(prompt(&history, 99).0, "Sccddee");
    }

    #[test]
    fn answers_are_retried_and_turns_taken_back() {
        let mut history = History::new(None);
        assert!(!history.retry());
        history.ask("a".to_owned());
        history.answer("b".to_owned());
        history.ask("c".to_owned());
        history.take_back();
        assert!(history.retry());
        assert_eq!(prompt(&history, 9).0, "a");
        history.answer("d".to_owned());
        assert_eq!(prompt(&history, 9).0, "ad");
        history.clear();
        assert!(!history.retry());
    }
}
