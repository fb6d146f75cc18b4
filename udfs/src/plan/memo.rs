//! Vectors of texts that were computed lately, or are being computed: each distinct text goes to the model once, as far
//! as memory goes.
//!
//! A *flight* is what one window of rows gave the model at once. Texts point into flights; the oldest flight goes when
//! there is no more room. Another window that needs a text of a flight that has not landed waits for it, after its own
//! flight has landed: so no two can wait for each other.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    sync::{Arc, Mutex},
};

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, UInt64Array},
        datatypes::DataType,
        row::{RowConverter, SortField},
    },
    error::Result,
};
use tokio::{runtime::Handle, sync::watch};

use crate::models::lock;

/// Constants that are remembered: a session has a few.
const MOST_CONSTANTS: usize = 256;
/// Bytes of all of them: some are the tokens of a long text.
const MOST_CONSTANT_BYTES: usize = 16 << 20;
/// Bytes of an entry besides its text.
const ENTRY_BYTES: usize = 96;

/// Vectors by text, for all queries of a session.
#[derive(Debug, Default)]
pub(crate) struct Memo {
    state: Mutex<State>,
    constants: Mutex<Constants>,
}

/// Bytes that are equal when texts are, whatever their encoding.
type Text = Arc<[u8]>;

/// Locked while it is computed: of several threads that need the same, one computes it.
type Constant = Arc<Mutex<Option<ArrayRef>>>;

/// A call and its text.
type ConstantKey = Arc<(String, Text)>;

/// Values of constants, as many as there is room for.
#[derive(Debug, Default)]
struct Constants {
    /// With the bytes of each, 0 while it is computed.
    values: HashMap<ConstantKey, (Constant, usize)>,
    /// The oldest first.
    order: VecDeque<ConstantKey>,
    bytes: usize,
}

impl Constants {
    /// The place of a constant's value.
    fn place(&mut self, key: &ConstantKey) -> Constant {
        if let Some((constant, _)) = self.values.get(key) {
            return Arc::clone(constant);
        }
        let constant = Constant::default();
        self.values.insert(Arc::clone(key), (Arc::clone(&constant), 0));
        self.order.push_back(Arc::clone(key));
        self.make_room();
        constant
    }

    /// Counts a value that was computed. What takes more than all may is not kept, and pushes nothing out.
    fn keep(&mut self, key: &ConstantKey, constant: &Constant, bytes: usize) {
        if bytes > MOST_CONSTANT_BYTES {
            return self.forget(key, constant);
        }
        // It may have made room for others meanwhile.
        if let Some((there, counted)) = self.values.get_mut(key)
            && Arc::ptr_eq(there, constant)
        {
            self.bytes = self.bytes - *counted + bytes;
            *counted = bytes;
            self.make_room();
        }
    }

    fn forget(&mut self, key: &ConstantKey, constant: &Constant) {
        if self.values.get(key).is_some_and(|(there, _)| Arc::ptr_eq(there, constant)) {
            self.order.retain(|other| other != key);
            self.remove(key);
        }
    }

    fn make_room(&mut self) {
        while (self.values.len() > MOST_CONSTANTS || self.bytes > MOST_CONSTANT_BYTES)
            && let Some(oldest) = self.order.pop_front()
        {
            self.remove(&oldest);
        }
    }

    fn remove(&mut self, key: &ConstantKey) {
        if let Some((_, bytes)) = self.values.remove(key) {
            self.bytes -= bytes;
        }
    }
}

#[derive(Debug, Default)]
struct State {
    /// By call, then by text.
    rows: HashMap<Arc<str>, HashMap<Text, Place>>,
    /// Those that have landed, the oldest first.
    landed: VecDeque<Arc<Flight>>,
    bytes: usize,
}

/// Where the value of a text is.
#[derive(Debug, Clone)]
struct Place {
    flight: Arc<Flight>,
    row: u32,
}

/// What one window gave the model.
#[derive(Debug)]
pub(crate) struct Flight {
    call: Arc<str>,
    texts: Vec<Text>,
    /// The values, once they are there.
    values: watch::Receiver<Option<ArrayRef>>,
}

impl Flight {
    /// The values; `None` when whoever computed them gave up.
    pub(crate) async fn landed(&self) -> Option<ArrayRef> {
        let mut values = self.values.clone();
        let landed = values.wait_for(Option::is_some).await.ok()?;
        landed.clone()
    }
}

/// A flight of one's own: its values are to be published. Dropped before that, its texts are computed by whoever needs
/// them.
#[derive(Debug)]
pub(crate) struct OwnFlight {
    memo: Arc<Memo>,
    flight: Arc<Flight>,
    values: watch::Sender<Option<ArrayRef>>,
    capacity: usize,
    published: bool,
}

/// Where the values of a window's rows come from.
#[derive(Debug)]
pub(crate) struct Lookup {
    /// Per row: flight of `flights`, and row in it; `None` for a NULL text.
    pub(crate) places: Vec<Option<(u32, u32)>>,
    /// The first is one's own.
    pub(crate) flights: Vec<Arc<Flight>>,
    /// To be computed, with the rows of the window that have its texts.
    pub(crate) own: OwnFlight,
    pub(crate) fresh: UInt64Array,
    /// Rows whose text another row of the window has.
    pub(crate) repeated: usize,
    /// Rows whose text was computed before, or is by another.
    pub(crate) remembered: usize,
}

impl Memo {
    /// Finds the texts of a window; those that nobody has or computes become a flight of one's own. With a capacity of 0
    /// bytes nothing is remembered, and only equal texts of the window are found.
    ///
    /// # Errors
    /// When the texts have a type that cannot be compared.
    pub(crate) fn look_up(self: &Arc<Self>, call: &str, texts: &ArrayRef, capacity: usize) -> Result<Lookup> {
        // A flight lands when its runtime goes on, so nobody waits for another runtime's.
        let runtime = Handle::try_current().map_or_else(|_| String::new(), |handle| handle.id().to_string());
        let call: Arc<str> = format!("{} {runtime}", key_of(call, texts.data_type())).into();
        let keys = keys(texts)?;
        let nulls = texts.logical_nulls();
        let (sender, values) = watch::channel(None);
        let mut fresh: Vec<u64> = Vec::new();
        let mut own_texts: Vec<Text> = Vec::new();
        let mut here: HashMap<&[u8], (u32, u32)> = HashMap::new();
        let mut others: Vec<Arc<Flight>> = Vec::new();
        let mut places = Vec::with_capacity(texts.len());
        let (mut repeated, mut remembered) = (0, 0);
        let mut state = lock(&self.state);
        let mut nothing = HashMap::new();
        let known = match capacity {
            0 => &mut nothing,
            _ => state.rows.entry(Arc::clone(&call)).or_default(),
        };
        for (row, key) in keys.iter().enumerate() {
            if nulls.as_ref().is_some_and(|nulls| nulls.is_null(row)) {
                places.push(None);
                continue;
            }
            let place = match here.entry(key) {
                Entry::Occupied(place) => {
                    repeated += 1;
                    *place.get()
                }
                Entry::Vacant(vacant) => *vacant.insert(match known.get(key.as_ref()) {
                    Some(place) => {
                        remembered += 1;
                        let flight = others.iter().position(|flight| Arc::ptr_eq(flight, &place.flight));
                        let flight = flight.unwrap_or_else(|| {
                            others.push(Arc::clone(&place.flight));
                            others.len() - 1
                        });
                        (flight as u32 + 1, place.row)
                    }
                    None => {
                        fresh.push(row as u64);
                        own_texts.push(Arc::clone(key));
                        (0, fresh.len() as u32 - 1)
                    }
                }),
            };
            places.push(Some(place));
        }
        let flight = Arc::new(Flight { call, texts: own_texts, values });
        if capacity > 0 {
            for (row, text) in flight.texts.iter().enumerate() {
                known.insert(Arc::clone(text), Place { flight: Arc::clone(&flight), row: row as u32 });
            }
        }
        drop(state);
        let flights = [Arc::clone(&flight)].into_iter().chain(others).collect();
        let own = OwnFlight { memo: Arc::clone(self), flight, values: sender, capacity, published: false };
        Ok(Lookup { places, flights, own, fresh: fresh.into(), repeated, remembered })
    }

    /// The value of a constant text, remembered or computed here.
    ///
    /// # Errors
    /// Those of `compute`, and when the text has a type that cannot be compared.
    pub(crate) fn constant(
        &self,
        call: &str,
        text: &ArrayRef,
        compute: impl FnOnce() -> Result<ArrayRef>,
    ) -> Result<ArrayRef> {
        let text_key = keys(text)?.into_iter().next().unwrap_or_else(|| Arc::from([]));
        let key: ConstantKey = Arc::new((key_of(call, text.data_type()), text_key));
        let constant = lock(&self.constants).place(&key);
        let mut value = lock(&constant);
        if let Some(value) = value.as_ref() {
            return Ok(Arc::clone(value));
        }
        let computed = match compute() {
            Ok(computed) => computed,
            Err(error) => {
                lock(&self.constants).forget(&key, &constant);
                return Err(error);
            }
        };
        *value = Some(Arc::clone(&computed));
        let bytes = key.0.len() + key.1.len() + ENTRY_BYTES + computed.get_array_memory_size();
        lock(&self.constants).keep(&key, &constant, bytes);
        Ok(computed)
    }

    fn forget(&self, flight: &Arc<Flight>) {
        forget(&mut lock(&self.state), flight);
    }
}

fn forget(state: &mut State, flight: &Arc<Flight>) {
    let Some(known) = state.rows.get_mut(&flight.call) else { return };
    for text in &flight.texts {
        if known.get(text).is_some_and(|place| Arc::ptr_eq(&place.flight, flight)) {
            known.remove(text);
        }
    }
    if known.is_empty() {
        state.rows.remove(&flight.call);
    }
}

impl OwnFlight {
    /// Hands the values to everybody who waits, and keeps them while there is room.
    pub(crate) fn publish(mut self, values: ArrayRef) {
        self.published = true;
        self.values.send_replace(Some(values));
        if self.capacity == 0 || self.flight.texts.is_empty() {
            return self.memo.forget(&self.flight);
        }
        let mut state = lock(&self.memo.state);
        state.bytes += bytes(&self.flight);
        state.landed.push_back(Arc::clone(&self.flight));
        while state.bytes > self.capacity
            && let Some(oldest) = state.landed.pop_front()
        {
            state.bytes -= bytes(&oldest);
            forget(&mut state, &oldest);
        }
    }
}

impl Drop for OwnFlight {
    fn drop(&mut self) {
        if !self.published {
            self.memo.forget(&self.flight);
        }
    }
}

fn bytes(flight: &Flight) -> usize {
    let texts: usize = flight.texts.iter().map(|text| text.len() + ENTRY_BYTES).sum();
    texts + flight.values.borrow().as_ref().map_or(0, |values| values.get_array_memory_size())
}

/// A list of tokens is another input than a string, whatever its bytes.
fn key_of(call: &str, kind: &DataType) -> String {
    let kind = match kind {
        DataType::Dictionary(_, value) => value,
        kind => kind,
    };
    format!("{call} {}", if kind.is_nested() { "tokens" } else { "text" })
}

fn keys(texts: &ArrayRef) -> Result<Vec<Text>> {
    let converter = RowConverter::new(vec![SortField::new(texts.data_type().clone())])?;
    let rows = converter.convert_columns(&[Arc::clone(texts)])?;
    Ok(rows.iter().map(|row| row.as_ref().into()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use datafusion::arrow::array::{Int32Array, StringArray, StringViewArray};

    fn texts(texts: &[Option<&str>]) -> ArrayRef {
        Arc::new(StringArray::from(texts.to_vec()))
    }

    fn fresh(lookup: &Lookup) -> &[u64] {
        lookup.fresh.values()
    }

    #[tokio::test]
    async fn equal_texts_are_computed_once() {
        let memo = Arc::new(Memo::default());
        let first = memo.look_up("f", &texts(&[Some("a"), None, Some("b"), Some("a")]), 1 << 20).unwrap();
        assert_eq!((fresh(&first), first.repeated, first.remembered), ([0, 2].as_slice(), 1, 0));
        assert_eq!(first.places, [Some((0, 0)), None, Some((0, 1)), Some((0, 0))]);
        // While the first is in the air, in another encoding; and for another call, everything is new.
        let views: ArrayRef = Arc::new(StringViewArray::from(vec!["b", "c"]));
        let second = memo.look_up("f", &views, 1 << 20).unwrap();
        assert_eq!((fresh(&second), second.remembered), ([1].as_slice(), 1));
        assert_eq!(second.places, [Some((1, 1)), Some((0, 0))]);
        assert_eq!(fresh(&memo.look_up("g", &views, 1 << 20).unwrap()).len(), 2);
        first.own.publish(Arc::new(Int32Array::from(vec![10, 20])));
        assert_eq!(second.flights[1].landed().await.unwrap().len(), 2);
        // Given up: nobody finds it any more, and who waits is told.
        let flight = Arc::clone(&second.flights[0]);
        drop(second);
        assert!(flight.landed().await.is_none());
        assert_eq!(fresh(&memo.look_up("f", &views, 1 << 20).unwrap()), [1]);
    }

    #[test]
    fn the_oldest_goes_first_and_nothing_stays_without_room() {
        let memo = Arc::new(Memo::default());
        let add = |text: &str, capacity: usize| {
            let found = memo.look_up("f", &texts(&[Some(text)]), capacity).unwrap();
            let is_fresh = !found.fresh.is_empty();
            if is_fresh {
                found.own.publish(Arc::new(Int32Array::from(vec![1; 1000])));
            }
            is_fresh
        };
        // Each takes a little more than 4,000 bytes.
        assert!(add("a", 9000) && add("b", 9000) && !add("a", 9000));
        assert!(add("c", 9000) && !add("b", 9000) && add("a", 9000));
        assert!(add("z", 0) && add("z", 0));
        assert!(lock(&memo.state).bytes <= 9000);
    }

    /// Whether the value of a constant, of so many bytes, had to be computed.
    fn computes(memo: &Memo, text: &str, bytes: usize) -> bool {
        let mut computed = false;
        let value = memo.constant("f", &texts(&[Some(text)]), || {
            computed = true;
            Ok(Arc::new(Int32Array::from(vec![1; bytes / 4])) as ArrayRef)
        });
        assert_eq!(value.unwrap().len(), bytes / 4);
        computed
    }

    #[test]
    fn constants_are_bounded_in_bytes() {
        let memo = Memo::default();
        // With a text and what is noted of it a little more than a quarter of all.
        let large = MOST_CONSTANT_BYTES / 4;
        let counted = || lock(&memo.constants).bytes;
        assert!(["a", "b", "c"].iter().all(|text| computes(&memo, text, large)));
        assert!(["a", "b", "c"].iter().all(|text| !computes(&memo, text, large)));
        assert!(counted() > 3 * large);
        // The oldest goes, and only that.
        assert!(computes(&memo, "d", large));
        assert!(["b", "c", "d"].iter().all(|text| !computes(&memo, text, large)));
        assert!(computes(&memo, "a", large) && counted() <= MOST_CONSTANT_BYTES);
        // What is larger than all may be is not kept, nor what cannot be computed; others stay.
        assert!(computes(&memo, "huge", 4 * large) && computes(&memo, "huge", 4 * large));
        assert!(memo.constant("f", &texts(&[Some("bad")]), || datafusion::common::exec_err!("bad")).is_err());
        assert!(["c", "d", "a"].iter().all(|text| !computes(&memo, text, large)));
        assert_eq!(lock(&memo.constants).order.len(), 3);
    }

    #[test]
    fn the_oldest_of_many_constants_goes_first() {
        let memo = Memo::default();
        let texts: Vec<String> = (0..=MOST_CONSTANTS).map(|n| n.to_string()).collect();
        assert!(texts.iter().all(|text| computes(&memo, text, 4)));
        assert!(texts[1..].iter().all(|text| !computes(&memo, text, 4)));
        assert!(computes(&memo, "0", 4) && !computes(&memo, "2", 4));
    }

    #[test]
    fn texts_and_tokens_are_not_the_same() {
        let kind = DataType::new_list(DataType::Utf8, true);
        assert_ne!(key_of("f", &kind), key_of("f", &DataType::Utf8));
        let dictionary = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8));
        assert_eq!(key_of("f", &dictionary), key_of("f", &DataType::Utf8View));
    }
}
