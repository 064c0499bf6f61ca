"""The words of the sample library (sample_library.py).

The pools are small and the words plain on purpose: each word is one token of a vocabulary of 1280 pieces, and occurs
often enough for a small model to learn it within minutes. A deed directly precedes its thing, and no two deeds share a
thing, so the previous token is enough to look up the thing.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


THINGS = {  # deed -> its possible objects
    "ate": _words("bacon bread cheese ham honey mutton pie plums porridge soup toast trout"),
    "built": _words("arches barns boats bridges huts kilns mills ovens sheds stairs towers walls"),
    "burned": _words("alder ash beech birch cedar elm hazel maple oak peat pine willow"),
    "caught": _words("bees crabs eels flies hares herring mice moths pike salmon shrimps toads"),
    "drank": _words("ale beer brandy broth cider cocoa mead milk perry tea water wine"),
    "feared": _words("dogs fog frost ghosts hail ice mist rain snow storms thunder wolves"),
    "fed": _words("bulls calves colts ducks geese goats hens horses lambs mules oxen pigs"),
    "grew": _words("barley beans carrots corn hemp hops leeks lettuce oats onions peas turnips"),
    "heard": _words("bells crows cuckoos gulls herons larks magpies owls robins rooks thrushes wrens"),
    "mended": _words("boots carts chairs clocks fences gates hats nets roofs saddles tools wheels"),
    "picked": _words("asters clover daisies fern iris ivy lilies mallow poppies roses thistles violets"),
    "played": _words("bowls cards chess darts dice dominoes draughts drums flutes marbles quoits whist"),
    "reached": _words("Alton Ashby Barton Corby Denby Fenton Hadley Linton Malton Norby Oakley Selby"),
    "read": _words("fables letters maps news novels plays poems psalms riddles sermons tales verses"),
    "sold": _words("baskets brooms buttons candles chalk needles nails pots ribbons ropes salt spices"),
    "wore": _words("cotton felt flannel fur lace leather linen satin silk straw tweed wool"),
}

NAMES = _words("Ada Anna Basil Bram Clara Dora Edgar Flora Giles Hugh Jane Lucy Mara Nora Ruth Tom")
SURNAMES = _words("Barrow Blake Cobb Crane Drake Frost Hale Holt Knox Marsh Penn Reed Shaw Thorn Vane Webb")
HOMES = _words("Bristol Cromer Dover Dunwick Exeter Harwich Oxford Poole Romney Rye Wells Whitby")
MATERIALS = _words("amber brass bronze copper crystal golden iron ivory oaken pewter silver velvet")
TREASURES = _words("bowl box candle coin comb cup key knife lantern locket ring spoon")

TIMES = ("In the morning", "At noon", "After that", "Before dark", "In the evening", "The next day", "Later")
PAUSES = ("Nobody spoke for a while.", "The road was long and white.", "So the day went by.", "It was very quiet.")
