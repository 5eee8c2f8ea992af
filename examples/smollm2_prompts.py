"""Write a deterministic, varied set of English user prompts as JSONL, for a small chat model to answer as draft-training data."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

TOTAL = 9000


def rows(text: str) -> list[str]:
    """Split a text block into its non-empty, stripped lines."""
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


def blocks(text: str) -> list[str]:
    """Split a text block into the parts that blank lines separate."""
    return text.strip().split("\n\n")


def items(text: str) -> list[str]:
    """Split a text block into its semicolon-separated items."""
    return [part.strip() for part in " ".join(text.split()).split(";") if part.strip()]


# ---------------------------------------------------------------------------------------------------------------------
# Words that fill the slots of the templates (see ``fill``).

WOMEN = items("""
    Amara; Brigid; Chiara; Daphne; Esme; Farida; Greta; Hana; Imani; Jolene; Katya; Leila; Mireille; Nadia; Odette; Priya; Rosalind;
    Saoirse; Tamsin; Ulla; Vera; Wanda; Xiomara; Yuki; Zelda; Carmen; Beatrix; Noor; Ingrid; Paloma
""")
MEN = items("""
    Anton; Bashir; Callum; Dmitri; Elias; Fergus; Gustavo; Hiro; Ivan; Jamal; Kwame; Luca; Mateo; Niall; Omar; Pavel; Quentin; Rafael;
    Stefan; Tobias; Umberto; Viktor; Wesley; Yusuf; Zane; Andres; Bruno; Cedric; Emeka; Leopold
""")
PRONOUNS = {"w": {"he": "she", "his": "her", "him": "her"}, "m": {"he": "he", "his": "his", "him": "him"}}
POOLS: dict[str, list[str]] = {
    "toy": items("""
        notebooks; puzzles; model planes; board games; yo-yos; kites; paint sets; comic books; jump ropes; card decks; plush bears;
        harmonicas; sketch pads; toy robots; frisbees; snow globes
    """),
    "food": items("""
        bagels; mangoes; muffins; burritos; pies; melons; croissants; sandwiches; dumplings; pretzels; cupcakes; avocados; pastries;
        wraps; jars of honey; loaves of bread
    """),
    "small": items("""
        beads; seashells; stamps; acorns; coins; postcards; badges; pebbles; ribbons; crayons; magnets; keychains; bottle caps; feathers;
        dominoes; trading cards
    """),
    "plant": items("""
        tulips; tomato plants; rose bushes; lavender pots; pine saplings; sunflowers; pepper plants; bonsai trees; ferns; lemon trees
    """),
    "animal": items("goats; ducks; rabbits; sheep; hens; ponies; turkeys; alpacas; geese; quails"),
    "shop": items("""
        a bakery; a hardware store; a bookshop; a pet shop; a florist; a bike shop; a music store; a garden centre; a tea house; a shoe
        shop; a craft market; a toy store
    """),
    "vehicle": items("van; truck; motorcycle; bus; scooter; delivery car; camper; pickup"),
    "city": items("""
        Lisbon; Osaka; Nairobi; Toronto; Bergen; Valparaiso; Hanoi; Tucson; Galway; Krakow; Auckland; Marrakesh; Seattle; Naples;
        Montevideo; Tbilisi; Perth; Halifax
    """),
    "sport": items("basketball; netball; handball; table tennis; badminton; lacrosse; volleyball; field hockey; water polo; futsal"),
    "gadget": items("""
        tablet; camera; bicycle; guitar; telescope; sewing machine; skateboard; coffee maker; printer; tent; keyboard; drone
    """),
    "craft": items("""
        scarves; candles; bracelets; clay mugs; birdhouses; quilts; wooden spoons; greeting cards; baskets; lanterns; tote bags; picture
        frames
    """),
    "color": items("red; blue; green; yellow; purple; orange; white; black; silver; pink"),
    "job": items("""
        electrician; tutor; gardener; plumber; carpenter; pianist; house painter; web designer; dog walker; translator; barber; mechanic
    """),
    "drink": items("lemonade; iced tea; apple cider; hot chocolate; ginger beer; orange juice; mango smoothie; coconut water"),
    "month": items("January; March; April; June; July; September; October; December"),
    "day": items("Monday; Tuesday; Wednesday; Thursday; Friday; Saturday"),
    "company": items("""
        Brightwell Labs; Norwood Foods; Cobalt Freight; Juniper Media; Halcyon Optics; Pinecrest Energy; Mossbank Textiles; Silverfin
        Software; Tern Robotics; Ashgrove Clinics
    """),
    "surname": items("""
        Okafor; Lindqvist; Marchetti; Haddad; Petrov; Nakamura; Delacroix; Brennan; Castellano; Ferreira; Osei; Novak; Sandoval; Whitlock
    """),
    "genre": items("mystery; fantasy; biography; travel; cooking; poetry; history; science"),
    "fruit": items("apples; pears; plums; cherries; figs; peaches; grapes; kiwis; bananas; lemons"),
}

# ---------------------------------------------------------------------------------------------------------------------
# Maths word problems. [x:3-9] draws a number, [x:10-50/5] draws with a step, [x*y+2] computes from earlier ones.

MATH = rows("""
{A} buys [x:3-9] {toy} at $[p:2-12] each and [y:2-7] {food} at $[q:1-6] each. {He} hands \
over $[160-220/10]. How much change should {he} receive?
{A} has [a:12-60] {small}. {B} has [k:2-5] times as many, and {C} has [d:3-11] fewer than {B}. How many {small} do all three have together?
A [t:20-90/10]-page album holds [n:4-9] photos on each page. {A} has already filled [f:5-15] pages and has [r:20-80] \
loose photos left to place. After placing them, how many empty photo spots remain?
{A} drives at [v:40-70/5] km per hour for [h:2-5] hours, rests, and then drives at [w:75-110/5] km \
per hour for [g:2-4] more hours. How far does {he} travel in all?
The price of a {gadget} was $[p:100-600/20]. During a sale it drops by [d:10-40/5]%, and {A} \
also uses a coupon worth $[c:5-15]. What does {A} pay?
{A} and {B} split $[660-1980/330] in the ratio [r:2-4] to [s:5-8]. How much larger is {B}'s share, as a fraction of the whole sum?
Three years ago, {A} was [k:2-4] times as old as {B}. {B} is [b:7-15] years old now. How old is {A} now?
{He} is not good at saving, yet {A} puts aside $[w:6-25] every week. {A} wants a {gadget} costing $[g:180-480/20] and \
already has $[h:20-80/10]. After [n:5-9] weeks, how much money is still missing?
A farmer keeps [a:15-60] {animal} and [k:2-4] times as many {animal2}. Each eats [f:2-5] scoops \
of feed a day. How many scoops are needed for [d:5-14] days?
{A} bakes [t:6-14] trays with [n:8-16] cookies on each. {He} gives [g:15-40] to the neighbours and packs the rest in \
boxes of [b:3-6]. How many full boxes can {he} make, and how many cookies are left over?
In a school of [20-60/2]0 pupils, [p:10-60/10]% cycle to class, and half of the others take the bus. How many pupils take the bus?
A tank holds [200-400/40] litres. A pipe fills it at [r:8-20/2] litres a minute, while a leak drains [l:2-5] \
litres a minute. Starting empty, how much water is in it after [m:5-9] minutes?
{A} earns $[w:12-30] per hour and works [h:5-9] hours a day, [d:4-6] days a week. {He} spends \
$[r:150-250/10] a week on rent. What is left after [n:2-6] weeks?
{A} reads [p:15-45] pages on {day}, twice that on the following day, and [q:10-30] pages on the third \
day. The book has [t:260-420/20] pages. How many pages remain?
A theatre sells adult tickets for $[a:12-25] and child tickets for $[c:5-11]. One evening [n:40-120] adults and \
[m:20-90] children attend. The hall rental costs $[r:300-600/50]. What profit is made?
{A} cuts a [120-360/60] metre rope into [n:3-6] equal parts and then cuts one of those parts \
in half. How long is each of the two shortest pieces?
A recipe for [s:4-6] people needs [f:200-600/50] grams of flour and [e:2-4] eggs. How much flour and \
how many eggs does {A} need for [k:3-5] times as many people?
{A} collects [a:10-25] {small} each day from {day} for [d:4-9] days, but loses [l:3-12] of them on the final \
day. {B} then doubles what {A} has left. How many does {A} end up with?
{A} sells {craft} for $[p:8-30] each. Materials cost $[m:2-7] per piece, and the market stall costs \
$[s:20-60/5] a day. If {he} sells [n:9-28] in one day, what is the net gain?
A train leaves {city} with [a:120-260] passengers. At the first stop [b:20-60] get off and [c:10-50] get on, and at the second \
stop a quarter of those on board, rounded down, leave. How many are still on the train?
The sum of {A}'s and {B}'s ages is [s:40-80/2]. {A} is [d:2-12/2] years older than {B}. How old will {B} be in [n:5-20] years?
{A} can paint a fence in [a:4-6] hours, and {B} needs [b:8-12/2] hours for the same fence. \
What part of the fence do they finish together in 2 hours?
A rectangular garden is [l:12-40] metres long and [w:5-11] metres wide. {A} leaves a gap of [g:2-4] metres for \
the gate and fences the rest at $[c:6-15] per metre. What does the fence cost?
{A} buys a crate of [n:40-120/20] {food} for $[p:30-90/10]. [w:5-15/5]% of them spoil and the \
rest are sold for $[s:2-4] each. How much profit does {A} make?
There are [r:6-15] rows of {plant} with [n:8-20] in every row. A storm ruins [d:2-4] complete rows \
and [e:5-7] single plants from another row. How many survive?
{A} runs [k:3-8] km every weekday and [w:10-18] km on each day of the weekend. How many kilometres does {he} run in [n:3-8] weeks?
A phone plan costs $[b:15-35] per month plus [c:5-20/5] cents for each text message over [f:50-100/10]. \
{A} sends [m:120-300/20] texts in {month}. What is the bill in dollars?
{A} pours [n:6-20] glasses of {drink}, each holding [g:150-350/50] millilitres, from a jug \
that held [t:8-10] litres. How many litres stay in the jug?
{shop!} receives [b:8-20] boxes with [n:12-36/6] {toy} in each. It sells [s:20-60] on {day} and \
[k:2-3] times that number the next day. How many are unsold?
{A} scored [a:60-80], [b:70-90] and [c:65-95] on three quizzes. What must {he} score on the fourth quiz to reach a mean of [m:76-82]?
A bag contains [r:4-12] {color} and [b:5-14] {color2} marbles. {A} adds enough {color} ones to triple \
their number. What fraction of all the marbles is {color} now?
{A} has $[m:120-300/20]. {He} spends a quarter of it on a {gadget} case, then a third of what \
remains on lunch with {B}. How many dollars does {he} have now?
A {vehicle} uses [l:6-12] litres of fuel per 100 km. {A} plans a trip of [d:3-9]00 km, and fuel costs \
$[p:2-3] per litre. What will the fuel for the round trip cost?
{A} types [w:35-70/5] words a minute, and {B} types [d:5-20/5] words a minute more. Both type for \
[m:8-25] minutes. How many words do they produce together?
At a {sport} camp there are [k:3-6] coaches for every [n:20-30/2] players. This summer [g:3-7] \
groups of that size signed up. How many people attend in total?
{A} plants [a:20-60/5] {plant} in spring. [p:60-90/10]% of them sprout, and rabbits eat \
[r:2-7] of the ones that sprouted. How many are left?
A baker makes [a:60-160/10] rolls. In the morning [p:25-75/25]% are sold, and in the afternoon \
[q:5-12] more. How many does {he} take home, if {A} is the baker?
{A} walks [s:6-12]000 steps on a working day and half as many on a day off. {He} works five days in a week. How many steps is that per week?
The {city} museum charges $[p:8-20] a visit, or $[q:50-90/5] for a yearly pass. {A} visits [n:6-15] \
times this year. How much does {he} save or lose with the pass?
{A}, {B} and {C} share a flat. The rent is $[r:900-1800/90] a month and the power bill is $[e:60-120/6]. {C} pays \
half of the rent; the other two divide everything else equally. What does {A} pay?
A printer makes [n:12-30/2] pages per minute. {A} prints [c:15-40/5] copies of a [p:6-18/2]-page booklet. How many minutes does this take?
{A} buys [k:3-8] packs of [n:6-24/6] {small} and shares them equally among [f:2-3] friends and {him}self. {B} \
is one of those friends and loses [l:2-5]. How many {small} does {B} have?
Water bottles come in cases of [c:12-24/4]. A {sport} club has [p:30-60] members who each drink \
[b:2-4] bottles on match day. How many cases must be bought?
{A} took [l:10-20] seconds less than {B} to swim a lane. {B} needed [t:50-75] seconds. {C} was \
[k:5-9] seconds faster than {A}. What is the sum of the three times?
A {gadget} loses [p:10-20/10]% of its value every year. {A} bought it for $[v:300-900/100]. What is it worth after two years?
{A} puts $[m:400-2000/200] into an account paying [r:2-6]% simple interest per year. How much money is in the account after [y:3-8] years?
A ladder has [n:18-40/2] rungs. {A} climbs half of them, goes down [d:2-5], then climbs [u:3-6] more. On which rung does {he} stand?
Each of [n:4-9] tables at a wedding seats [s:6-12] guests. [e:5-15] guests do not come, and each of \
the others eats [p:2-3] slices of cake. How many slices are eaten?
{A} picks [a:25-60] {fruit}, {B} picks [k:2-3] times that many, and they throw out [r:6-20] rotten ones. The \
good ones go into [b:3-5] baskets. About how many are in each basket?
A square tile has a side of [s:20-40/10] cm. {A} is tiling a floor that measures [l:4-8] m by [w:3-6] \
m. How many tiles cover a strip [s] cm wide along the longer wall?
{A} left home at [h:6-9]:15 a.m. and needed [m:25-50/5] minutes for the bus, [w:6-14] minutes on \
foot and [c:5-10] minutes in a cafe. At what time did {he} arrive?
A shelter has [c:2-5] cats for every [d:6-9] dogs. Today it counts [k:4-9] such groups of cats and dogs. Each dog \
costs $[f:3-6] a day to feed. What does feeding all the dogs cost per week?
{A} gets a [p:10-25/5]% tip on every order. On {day} {he} served [n:8-20] tables, each with an \
average bill of $[b:20-60/20]. How much did {he} earn in tips?
A factory makes [n:40-120/10] lamps an hour and runs [h:8-16/2] hours a day. One lamp in every \
[q:20-40/20] is faulty. How many good lamps are made in [d:3-6] days?
{A} has [q:6-18] quarters, [d:5-20] dimes and [n:4-16] nickels. {He} gives {B} half of the dollar \
value, rounded down to a whole cent. How much does {A} keep?
A hiking trail is [t:18-36/3] km long. {A} covers a third on the first day and [k:3-5] km more \
than that on the second day. How far is left for the third day?
{A} charges $[f:20-40/5] for a visit plus $[h:15-35/5] per hour as a {job}. A customer had {him} in \
for [n:2-7] hours and got $[c:4-12] off. How much was the bill?
Two buses leave {city} at noon in opposite directions, one at [a:50-70/5] km/h and the other at \
[b:72-96/4] km/h. How far apart are they at [t:2-5] p.m.?
{A} orders [x:2-6] pizzas cut into [s:6-10/2] slices. {He} eats [e:2-3] slices, {B} eats twice as many \
as {A}, and {C} eats one fewer than {B}. How many slices remain?
A library has [n:200-600/50] {genre} books and [k:2-3] times as many {genre2} books. It donates \
[p:10-20/10]% of the {genre} books. How many of both types does it keep?
{A} mixes [a:3-6] parts {drink} with one part water. {He} wants [c:5-9] jugs with [a+1] cups \
of mixture in each. How many cups of {drink} are used?
{A}'s garden produces [n:12-30] kg of {fruit} each week during the summer's [w:8-12] weeks. {He} \
sells three quarters at $[p:3-6] per kg. What is {his} income?
A cinema has [r:12-20] rows of [s:14-24/2] seats. It is [p:50-75/25]% full. Popcorn is bought by half \
of those present at $[c:4-7] each. How much is spent on popcorn?
{A} and {B} start with the same number of {small}. {A} gives {B} [g:4-14], and then {B} \
has [b:40-70/2]. How many does {A} have after the gift?
A worker stacks [a:8-20] bricks a minute for the first [m:10-25/5] minutes and [b:4-7] bricks a \
minute afterwards. How many bricks are stacked in a full hour?
{A} buys a {gadget} in [n:6-12/2] monthly payments of $[p:25-60/5] after a deposit of $[d:30-90/10]. The cash \
price was $[c:200-240/10]. How much more does {he} pay by instalments?
A parking garage charges $[f:3-6] for the first hour and $[n:2-3] for each extra hour. {A} \
parks from [s:8-10] a.m. to [e:2-6] p.m. What is the fee?
{A} weighs [w:55-90] kg. {B} weighs [d:4-15] kg less than {A}, and {C} weighs half as much \
as {A} and {B} combined. What is their total weight?
Of [t:40-120/20] guests, a fifth drink tea, a quarter drink coffee and the rest have {drink}. If each \
{drink} costs $[c:2-5], how much does the {drink} cost altogether?
A candle [h:18-36/2] cm tall burns [r:2-3] cm per hour. {A} lights it at 5 p.m. and blows it out \
[n:3-5] hours later. What percentage of the candle is left?
{A} folds [a:4-9] paper cranes every [m:10-15/5] minutes. {He} needs [k:5-9] times that many for a school display. How long will it take?
In a {sport} season, {A}'s team won [w:10-20] games, lost [l:3-9] and drew [d:2-6]. A win is worth 3 \
points and a draw 1. How many more points would {he} need for [g:70-90]?
A box of [n:24-60/12] {food} costs $[c:18-48/6]. {A} sells each for $[s:2-3]. If {he} buys \
[b:2-6] boxes and sells everything, what is the total profit?
{A} downloads a [g:12-48/4] GB game at [r:2-4] GB every [m:5-10/5] minutes. After a third of it arrives, the \
connection stops for [p:8-20] minutes. How long does the download take?
There are [t:8-16] tricycles and [b:9-25] bicycles in a yard. {A} takes away [k:2-5] bicycles. How many wheels are left in the yard?
{A} drinks [g:5-9] glasses of water a day, and {B} drinks [k:2-4] glasses fewer. A glass holds \
[m:200-300/50] ml. How many litres do they drink in [d:5-10/5] days?
A tailor needs [s:2-4] metres of cloth for a shirt and [c:5-7] metres for a coat. {A} orders [x:4-9] shirts \
and [y:2-5] coats; cloth costs $[p:6-14] a metre. What is the cloth bill?
{A} is [a:9-14] and {his} grandmother is [k:5-6] times as old. In how many years will the grandmother be exactly three times as old as {A}?
{company} had [n:200-500/20] employees. It hired [p:10-25/5]% more in {month} and then \
lost [q:12-30] people. How many employees does it have?
{A} wins [t:60-200/20] tickets at a fair. A {color} prize costs [x:8-15] tickets and a {color2} prize [y:3-6]. {He} takes \
[m:2-4] {color} prizes and as many {color2} prizes as possible. How many tickets are left?
A snail climbs [u:4-8] cm each day and slips back [d:1-3] cm each night. It starts at the bottom of a \
[h:30-60/5] cm wall. How high is it after [n:4-6] full days and nights?
{A} bought [n:10-40/10] shares of {company} at $[p:12-30] each and sold them at $[q:31-50] each, paying \
a $[f:5-20/5] fee for each of the two trades. What was the gain?
{A} needs [n:90-200/10] invitations. {He} writes [a:8-12] an hour, and {B} writes [b:5-7] an hour. After \
working together for [h:3-5] hours, how many are still unwritten?
A van carries [n:30-60/5] parcels. Each of the first [k:6-12] stops takes 2 parcels, and each of the \
next [m:3-5] takes [j:3-4]. How many parcels are still in the van?
{A} earns [p:5-10/5]% commission on sales. Last week {he} sold [a:3-9] {gadget}s at $[v:100-400/20] and \
this week twice as many. What is {his} commission for both weeks?
An aquarium has [g:10-30] guppies, twice as many tetras, and [d:3-9] fewer snails than tetras. If \
each fish or snail costs $[c:2-5], what are they all worth?
{A} slept [a:6-8] hours on each weeknight and [b:9-10] hours on each of the other two nights. How \
far is {his} weekly average from 8 hours, in minutes per night?
{A} has read [p:20-60/20]% of a [n:200-500/50]-page book. If {he} reads [r:15-30/5] pages a \
day from now on, how many days are needed to finish it?
A rectangular yard is [w:4-15] metres wide and [l:16-30] metres long. {A} doubles the width. By \
how much does the area grow, and what is the new perimeter?
A delivery of [n:12-30] sacks of rice weighs [k:15-25/5] kg per sack. A restaurant uses [u:8-14] \
kg a day. How many kilograms are left after [d:10-20] days?
{A} has [k:3-5] shelves, each with [n:12-25] {genre} books, and {B} has [m:4-6] shelves, each with \
[j:8-11]. {A} lends {B} [l:5-10]. Who has more books now, and by how many?
Half of {A}'s {small} are {color}, a third are {color2}, and the other [n:4-15] are {color3}. How many {small} does {A} have in total?
{A} jogs at [a:8-11] km/h and {B} cycles at [b:18-26/2] km/h along the same road. {B} starts [h:1-2] hour(s) \
later. How far ahead is {A} when {B} has been riding for half an hour?
""")
MATH_WRAPS = rows("""
{q}\\n\\nSolve this step by step.
Work out the answer to this problem and show your reasoning: {q}
{q} Explain each step.
Please help me with this homework question. {q}
{q}\\nGive the final number on its own line.
I keep getting this one wrong, can you check how it is done? {q}
""")

# ---------------------------------------------------------------------------------------------------------------------
# Python functions: signature | what it returns | example call => result | another example.

FUNCTIONS = rows("""
tally_evens(nums: list[int]) -> int | how many of the numbers are even | [1, 2, 4] => 2 | [7, 9] => 0
spread(values: list[int]) -> int | the difference between the biggest and the smallest \
value, or 0 for an empty list | [4, 9, 1] => 8 | [] => 0
initials(full_name: str) -> str | the upper-case initials of a full name, each followed by a dot \
| "ada lovelace" => "A.L." | "grace b hopper" => "G.B.H."
second_largest(nums: list[int]) -> int | the second largest distinct number in the list | [5, 1, 5, 3] => 3 | [2, 8] => 2
running_total(nums: list[int]) -> list[int] | a list whose item i is the sum of the first i + 1 numbers | [1, 2, 3] => [1, 3, 6] | [] => []
chunk(seq: list, size: int) -> list[list] | the list cut into pieces of the given size, the last of \
which may be shorter | [1, 2, 3], 2 => [[1, 2], [3]] | [], 4 => []
flatten_once(nested: list[list]) -> list | one list with the items of all inner lists in order | [[1], [2, 3]] => [1, 2, 3] | [[], []] => []
char_counts(text: str) -> dict[str, int] | a dictionary from each character to the number of times it \
occurs | "hello" => {'h': 1, 'e': 1, 'l': 2, 'o': 1} | "" => {}
is_leap(year: int) -> bool | True when the year is a leap year in the Gregorian calendar | 2000 => True | 1900 => False
celsius_to_fahrenheit(deg: float) -> float | the temperature converted from Celsius to Fahrenheit | 100 => 212.0 | -40 => -40.0
title_case(sentence: str) -> str | the sentence with the first letter of each word in upper case and \
the rest in lower case | "good MORNING" => "Good Morning" | "" => ""
dedupe(seq: list) -> list | the list without repeated items, keeping the first occurrence of each | [3, 1, 3, 2] => [3, 1, 2] | [] => []
rotate_left(seq: list, k: int) -> list | the list rotated k places to the left | [1, 2, 3, 4], 1 => [2, 3, 4, 1] | [1, 2], 2 => [1, 2]
transpose(matrix: list[list[int]]) -> list[list[int]] | the matrix with its rows and columns \
exchanged | [[1, 2], [3, 4]] => [[1, 3], [2, 4]] | [[5]] => [[5]]
diagonal_sum(matrix: list[list[int]]) -> int | the sum of the main diagonal of a square matrix | [[1, 2], [3, 4]] => 5 | [[7]] => 7
are_anagrams(a: str, b: str) -> bool | True if the two strings are anagrams, ignoring case and \
spaces | "Dusty", "study" => True | "cat", "cot" => False
power_of_two(n: int) -> bool | True when n is a positive power of two | 64 => True | 12 => False
collatz_length(n: int) -> int | the number of steps that the Collatz process needs to get from n to 1 | 1 => 0 | 6 => 8
digit_product(n: int) -> int | the product of the decimal digits of a non-negative integer | 234 => 24 | 105 => 0
reverse_words(sentence: str) -> str | the sentence with its words in the opposite order | "we love tea" => "tea love we" | "hi" => "hi"
longest_word(sentence: str) -> str | the longest word, and the first of them if several have that \
length | "a tiny elephant" => "elephant" | "red fog" => "red"
caesar(text: str, shift: int) -> str | the text with each lower-case letter moved forward by shift \
places in the alphabet | "xyz", 2 => "zab" | "a b", 1 => "b c"
run_lengths(text: str) -> list[tuple[str, int]] | a list of each character with the length of \
its run | "aabc" => [('a', 2), ('b', 1), ('c', 1)] | "" => []
hamming(a: str, b: str) -> int | the number of positions at which two equally long strings differ | "karol", "kathy" => 3 | "aa", "aa" => 0
merge_sorted(a: list[int], b: list[int]) -> list[int] | one sorted list made from two sorted \
lists | [1, 4], [2, 3] => [1, 2, 3, 4] | [], [5] => [5]
binary_search(nums: list[int], target: int) -> int | the index of target in a sorted list, or -1 \
if it is missing | [1, 3, 5], 3 => 1 | [1, 3, 5], 4 => -1
bubble_sort(nums: list[int]) -> list[int] | the numbers in ascending order, without \
calling sorted or sort | [3, 1, 2] => [1, 2, 3] | [] => []
common_prefix(words: list[str]) -> str | the longest prefix that all the words share | ["flow", "flag"] => "fl" | ["dog", "cat"] => ""
group_by_length(words: list[str]) -> dict[int, list[str]] | a dictionary from a word length to the words of \
that length | ["a", "to", "be"] => {1: ['a'], 2: ['to', 'be']} | [] => {}
invert_mapping(d: dict[str, int]) -> dict[int, str] | a dictionary whose keys are the old values and \
whose values are the old keys | {"a": 1} => {1: 'a'} | {} => {}
mode_of(nums: list[int]) -> int | the number that occurs most often, the smaller one on a tie | [2, 2, 3] => 2 | [5, 4, 5, 4] => 4
weighted_mean(values: list[float], weights: list[float]) -> float | the mean of the values weighted \
by the weights | [1, 3], [1, 1] => 2.0 | [10, 0], [3, 1] => 7.5
clamp(x: float, low: float, high: float) -> float | x limited to the range from low to high | 12, 0, 10 => 10 | -3, 0, 10 => 0
seconds_to_clock(total: int) -> str | the number of seconds written as hours, minutes and seconds, two \
digits each, with colons | 3661 => "01:01:01" | 59 => "00:00:59"
minutes_between(start: str, end: str) -> int | the number of minutes between two HH:MM times on \
the same day | "09:30", "10:15" => 45 | "00:00", "01:00" => 60
every_nth(seq: list, n: int) -> list | each n-th item of the list, starting with the first | [1, 2, 3, 4, 5], 2 => [1, 3, 5] | [9], 3 => [9]
missing_number(nums: list[int]) -> int | the one number from 0 to n that is absent from a \
list of n distinct numbers | [0, 1, 3] => 2 | [1] => 0
move_zeros(nums: list[int]) -> list[int] | the list with all zeros moved to its end and the other \
numbers kept in order | [0, 1, 0, 2] => [1, 2, 0, 0] | [0] => [0]
two_sum_indices(nums: list[int], target: int) -> tuple[int, int] | the indices of the two numbers that \
add up to target | [2, 7, 11], 9 => (0, 1) | [3, 3], 6 => (0, 1)
perfect_number(n: int) -> bool | True if n equals the sum of its proper divisors | 28 => True | 12 => False
divisors_of(n: int) -> list[int] | all positive divisors of n in ascending order | 12 => [1, 2, 3, 4, 6, 12] | 7 => [1, 7]
primes_below(limit: int) -> list[int] | all primes that are smaller than limit | 10 => [2, 3, 5, 7] | 2 => []
least_common_multiple(a: int, b: int) -> int | the smallest positive number that both a and b divide | 4, 6 => 12 | 5, 7 => 35
digital_root(n: int) -> int | the single digit reached by adding the digits again and again | 942 => 6 | 5 => 5
armstrong(n: int) -> bool | True if n equals the sum of its digits each raised to the number of digits | 153 => True | 10 => False
pascal_row(n: int) -> list[int] | row n of Pascal's triangle, where row 0 is [1] | 3 => [1, 3, 3, 1] | 0 => [1]
factorial_of(n: int) -> int | the product of all whole numbers from 1 to n | 5 => 120 | 0 => 1
tribonacci_list(n: int) -> list[int] | the first n terms of the sequence that starts 0, 1, 1 and \
adds the last three terms | 5 => [0, 1, 1, 2, 4] | 1 => [0]
to_binary_text(n: int) -> str | the binary digits of a non-negative integer without any prefix | 10 => "1010" | 0 => "0"
from_roman(numeral: str) -> int | the value of a Roman numeral | "XIV" => 14 | "MCM" => 1900
hex_to_rgb(code: str) -> tuple[int, int, int] | the red, green and blue parts of a hex color \
| "#ff0080" => (255, 0, 128) | "#000000" => (0, 0, 0)
mask_card(number: str) -> str | the card number with all but its last four characters \
replaced by stars | "12345678" => "****5678" | "1234" => "1234"
valid_password(pw: str) -> bool | True if the password has at least 8 characters, a digit and an \
upper-case letter | "Sunny2day" => True | "short1A" => False
valid_email(address: str) -> bool | True if the text has one @ with something before it and a dot \
somewhere after it | "a@b.org" => True | "nobody" => False
snake_to_camel(name: str) -> str | the snake_case name written in camelCase | "user_first_name" => "userFirstName" | "id" => "id"
camel_to_snake(name: str) -> str | the camelCase name written in snake_case | "pageCount" => "page_count" | "x" => "x"
squeeze_spaces(text: str) -> str | the text with each run of spaces replaced by one space \
and none at either end | "  a   b " => "a b" | "" => ""
vowel_ratio(word: str) -> float | the share of letters in the word that are vowels | "idea" => 0.75 | "sky" => 0.0
pig_latin(word: str) -> str | the word with its first letter moved to the end and followed by "ay" | "table" => "abletay" | "cat" => "atcay"
acronym(phrase: str) -> str | the first letters of all words in upper case | "random \
access memory" => "RAM" | "as soon as possible" => "ASAP"
center_line(text: str, width: int) -> str | the text centred in a line of the given width and \
padded with dashes | "ab", 6 => "--ab--" | "abc", 3 => "abc"
wrap_words(text: str, width: int) -> list[str] | the words of the text arranged in lines no longer than \
width | "one two three", 7 => ["one two", "three"] | "", 5 => []
count_sentences(text: str) -> int | the number of full stops, question marks and exclamation \
marks in the text | "Hi. Are you well?" => 2 | "no" => 0
word_frequencies(text: str) -> dict[str, int] | a dictionary with the number of times each lower-cased \
word appears | "Tea tea milk" => {'tea': 2, 'milk': 1} | "" => {}
top_words(text: str, n: int) -> list[str] | the n most frequent words, ties in alphabetical order | "b a b c", 2 => ["b", "a"] | "", 3 => []
remove_punctuation(text: str) -> str | the text without commas, full stops, colons, semicolons, \
question or exclamation marks | "Hi, you!" => "Hi you" | "ok" => "ok"
swap_ends(text: str) -> str | the text with its first and last characters exchanged | "planet" => "tlanep" | "x" => "x"
alternate_case(text: str) -> str | the text with letters in alternating upper and lower \
case, starting with upper | "river" => "RiVeR" | "" => ""
is_pangram(sentence: str) -> bool | True when each letter of the English alphabet is in the \
sentence | "hello" => False | "abcdefghijklmnopqrstuvwxyz" => True
is_isogram(word: str) -> bool | True if no letter is repeated in the word | "lumber" => True | "letter" => False
ordinal(n: int) -> str | the number with its English ordinal ending | 1 => "1st" | 12 => "12th"
number_words(n: int) -> str | the English word for a number from 0 to 10 | 7 => "seven" | 0 => "zero"
format_price(cents: int) -> str | the amount in cents written as dollars with two decimals | 1999 => "$19.99" | 5 => "$0.05"
make_change(cents: int) -> dict[int, int] | how many coins of 25, 10, 5 and 1 cents give the amount with the \
fewest coins | 41 => {25: 1, 10: 1, 5: 1, 1: 1} | 0 => {25: 0, 10: 0, 5: 0, 1: 0}
apply_discount(price: float, percent: float) -> float | the price after the discount, \
rounded to two decimals | 80, 25 => 60.0 | 19.99, 0 => 19.99
cart_total(cart: dict[str, tuple[int, float]]) -> float | the sum of quantity times price \
over all products | {"pen": (2, 1.5)} => 3.0 | {} => 0
compound(principal: float, rate: float, years: int) -> float | the balance after yearly \
compounding, rounded to cents | 100, 0.1, 2 => 121.0 | 50, 0.0, 9 => 50.0
bmi_label(weight: float, height: float) -> str | "low", "normal" or "high" for a body mass index below \
18.5, below 25, or above | 70, 1.75 => "normal" | 50, 1.8 => "low"
letter_score(word: str) -> int | the sum of the alphabet positions of the letters, where a is 1 | "abc" => 6 | "Z" => 26
dot_product(a: list[float], b: list[float]) -> float | the dot product of two vectors | [1, 2], [3, 4] => 11 | [], [] => 0
distance(p: tuple[float, float], q: tuple[float, float]) -> float | the straight-line distance \
between two points | (0, 0), (3, 4) => 5.0 | (1, 1), (1, 1) => 0.0
manhattan(p: tuple[int, int], q: tuple[int, int]) -> int | the grid distance between two points | (1, 2), (4, 6) => 7 | (0, 0), (0, 0) => 0
circle_area(radius: float) -> float | the area of a circle, rounded to two decimals | 1 => 3.14 | 0 => 0.0
midpoint(p: tuple[float, float], q: tuple[float, float]) -> tuple[float, float] | the point halfway between \
two points | (0, 0), (4, 2) => (2.0, 1.0) | (1, 1), (1, 1) => (1.0, 1.0)
rectangles_overlap(a: tuple, b: tuple) -> bool | True if two rectangles given as (left, top, right, bottom) share some \
area | (0, 0, 2, 2), (1, 1, 3, 3) => True | (0, 0, 1, 1), (2, 2, 3, 3) => False
quadratic_roots(a: float, b: float, c: float) -> list[float] | the real roots of a*x*x + b*x + c \
in ascending order | 1, -3, 2 => [1.0, 2.0] | 1, 0, 1 => []
slope(p: tuple[float, float], q: tuple[float, float]) -> float | the slope of the line through two points, or \
None if it is vertical | (0, 0), (2, 4) => 2.0 | (1, 0), (1, 5) => None
identity(n: int) -> list[list[int]] | the n by n identity matrix as a list of rows | 2 => [[1, 0], [0, 1]] | 1 => [[1]]
matrix_add(a: list[list[int]], b: list[list[int]]) -> list[list[int]] | the sum of two matrices of \
one shape | [[1, 2]], [[3, 4]] => [[4, 6]] | [[0]], [[5]] => [[5]]
matrix_multiply(a: list[list[int]], b: list[list[int]]) -> list[list[int]] | the product of two \
matrices | [[1, 2]], [[3], [4]] => [[11]] | [[2]], [[5]] => [[10]]
spiral_order(grid: list[list[int]]) -> list[int] | the items of the grid read in a clockwise spiral \
from the top left | [[1, 2], [4, 3]] => [1, 2, 3, 4] | [[9]] => [9]
count_islands(grid: list[list[int]]) -> int | the number of groups of 1s that touch up, down, left or right | [[1, 0, 1]] => 2 | [[0]] => 0
neighbors(row: int, col: int, rows: int, cols: int) -> list[tuple[int, int]] | the cells directly above, below, left and \
right that lie inside the grid | 0, 0, 2, 2 => [(1, 0), (0, 1)] | 0, 0, 1, 1 => []
balanced(text: str) -> bool | True if round, square and curly brackets in the text are properly closed | "[(a)]" => True | "([)]" => False
depth(nested: list) -> int | how deeply lists are nested inside the list, where a flat list has depth 1 | [1, [2, [3]]] => 3 | [] => 1
eval_rpn(tokens: list[str]) -> int | the value of an expression in reverse Polish notation with +, - \
and * | ["2", "3", "+"] => 5 | ["4", "2", "3", "*", "-"] => -2
max_profit(prices: list[int]) -> int | the best profit from buying once and selling later, or 0 | [7, 1, 5, 3] => 4 | [5, 4] => 0
longest_streak(days: list[bool]) -> int | the length of the longest run of True values | [True, True, False, True] => 2 | [] => 0
longest_increasing_run(nums: list[int]) -> int | the length of the longest stretch in which each number \
is bigger than the one before | [1, 2, 0, 3, 4, 5] => 4 | [] => 0
peak_index(nums: list[int]) -> int | the index of the first number larger than both of its \
neighbours, or -1 | [1, 3, 2] => 1 | [1, 2, 3] => -1
moving_average(nums: list[float], k: int) -> list[float] | the averages of every k numbers \
in a row | [1, 2, 3], 2 => [1.5, 2.5] | [4], 1 => [4.0]
normalize(nums: list[float]) -> list[float] | the numbers divided by their sum | [1, 3] => [0.25, 0.75] | [5] => [1.0]
variance(nums: list[float]) -> float | the population variance of the numbers | [1, 3] => 1.0 | [2, 2] => 0.0
percentile_rank(scores: list[int], x: int) -> float | the percentage of scores that are \
lower than x | [10, 20, 30, 40], 30 => 50.0 | [5], 5 => 0.0
outliers(nums: list[float], limit: float) -> list[float] | the numbers whose distance from the mean \
is more than limit | [1, 2, 30], 15 => [30] | [1, 1], 5 => []
partition(nums: list[int], pivot: int) -> tuple[list[int], list[int]] | a list of the numbers below pivot and \
a list of the rest | [3, 8, 1], 4 => ([3, 1], [8]) | [], 0 => ([], [])
interleave(a: list, b: list) -> list | the items of two equally long lists taken in turn | [1, 3], [2, 4] => [1, 2, 3, 4] | [], [] => []
zip_to_dict(keys: list[str], values: list[int]) -> dict[str, int] | a dictionary that pairs each key with the \
value at its position | ["a", "b"], [1, 2] => {'a': 1, 'b': 2} | [], [] => {}
merge_counts(a: dict[str, int], b: dict[str, int]) -> dict[str, int] | a dictionary with the counts of both added \
up per key | {"x": 1}, {"x": 2, "y": 5} => {'x': 3, 'y': 5} | {}, {} => {}
filter_by_value(d: dict[str, int], minimum: int) -> dict[str, int] | the entries whose value is at \
least minimum | {"a": 1, "b": 5}, 3 => {'b': 5} | {}, 1 => {}
sort_by_value(d: dict[str, int]) -> list[str] | the keys ordered by their values from \
high to low | {"a": 1, "b": 2} => ["b", "a"] | {} => []
deep_get(data: dict, path: str) -> object | the value found by following the dotted path through nested \
dictionaries, or None | {"a": {"b": 1}}, "a.b" => 1 | {}, "x" => None
flatten_dict(data: dict) -> dict | a flat dictionary whose keys are the dotted paths of a \
nested one | {"a": {"b": 1}} => {'a.b': 1} | {} => {}
parse_query(query: str) -> dict[str, str] | a dictionary from the keys to the values of a \
URL query | "a=1&b=2" => {'a': '1', 'b': '2'} | "" => {}
parse_csv_line(line: str) -> list[str] | the fields of a comma-separated line with surrounding \
spaces removed | "a, b ,c" => ["a", "b", "c"] | "x" => ["x"]
file_extension(path: str) -> str | the lower-case extension of a file name without the dot, or \
"" if there is none | "photo.JPG" => "jpg" | "README" => ""
domain_of(url: str) -> str | the host part of a web address | "https://example.org/a" => "example.org" | "http://x.io" => "x.io"
slugify(title: str) -> str | the title in lower case with hyphens between words and without other \
symbols | "Hello, World!" => "hello-world" | "One" => "one"
shorten(text: str, limit: int) -> str | the text cut to limit characters with "..." at the end if \
it was longer | "abcdefgh", 5 => "ab..." | "abc", 5 => "abc"
censor(text: str, banned: list[str]) -> str | the text with each banned word replaced by as many \
stars | "bad dog", ["bad"] => "*** dog" | "ok", [] => "ok"
count_substring_hits(text: str, part: str) -> int | how often part occurs in the text \
without overlaps | "banana", "an" => 2 | "aaa", "aa" => 1
first_unique_char(text: str) -> str | the first character that occurs only once, or "" if there is none | "swiss" => "w" | "aabb" => ""
expand_ranges(text: str) -> list[int] | all numbers in a list of ranges such as 1-3,7 | "1-3,7" => [1, 2, 3, 7] | "5" => [5]
compress_ranges(nums: list[int]) -> str | the sorted numbers with consecutive runs written as ranges | [1, 2, 3, 7] => "1-3,7" | [4] => "4"
stairs(n: int) -> int | the number of ways to climb n stairs with steps of one or two | 3 => 3 | 4 => 5
grid_paths(rows: int, cols: int) -> int | the number of ways from the top left to the bottom right \
of a grid moving only right or down | 2, 2 => 2 | 3, 3 => 6
min_coins(coins: list[int], amount: int) -> int | the smallest number of coins that make \
the amount, or -1 | [1, 3, 4], 6 => 2 | [5], 3 => -1
knapsack(weights: list[int], values: list[int], capacity: int) -> int | the largest value that fits \
into the capacity | [1, 2, 3], [6, 10, 12], 5 => 22 | [], [], 4 => 0
edit_distance(a: str, b: str) -> int | the smallest number of insertions, deletions and \
substitutions that turn a into b | "kitten", "sitting" => 3 | "", "ab" => 2
common_subsequence(a: str, b: str) -> int | the length of the longest sequence of characters that \
both strings contain in order | "abcde", "ace" => 3 | "a", "b" => 0
power_set(seq: list[int]) -> list[list[int]] | all subsets of the list, shorter ones first | [1, 2] => [[], [1], [2], [1, 2]] | [] => [[]]
permutations_of(text: str) -> list[str] | all arrangements of the distinct letters of the text in sorted \
order | "abc" => ["abc", "acb", "bac", "bca", "cab", "cba"] | "x" => ["x"]
pairs_with_difference(nums: list[int], d: int) -> int | how many pairs of numbers differ by exactly d | [1, 3, 5], 2 => 2 | [1, 1], 3 => 0
hanoi_moves(disks: int) -> int | the number of moves that the Tower of Hanoi needs for that many disks | 3 => 7 | 1 => 1
fast_power(base: int, exponent: int) -> int | base raised to a non-negative exponent by repeated squaring | 2, 10 => 1024 | 7, 0 => 1
integer_sqrt(n: int) -> int | the whole part of the square root, found without the math module | 17 => 4 | 25 => 5
bit_count(n: int) -> int | the number of ones in the binary form of n | 13 => 3 | 0 => 0
swap_keys(d: dict[str, int], a: str, b: str) -> dict[str, int] | the dictionary with the values of keys a and b exchanged | \
{"x": 1, "y": 2}, "x", "y" => {'x': 2, 'y': 1} | {"k": 3, "m": 3}, "k", "m" => {'k': 3, 'm': 3}
day_of_year(month: int, day: int) -> int | the position of the date in a year that is not a leap year | 2, 1 => 32 | 12, 31 => 365
weekday_after(day: str, n: int) -> str | the day of the week n days after the given one | "Mon", 3 => "Thu" | "Sun", 7 => "Sun"
age_in_years(birth: tuple[int, int, int], today: tuple[int, int, int]) -> int | the age on a date, both dates given as \
(year, month, day) | (2000, 6, 1), (2020, 5, 31) => 19 | (2000, 6, 1), (2020, 6, 1) => 20
angle_between(hour: int, minute: int) -> float | the smaller angle between the two hands of a clock | 3, 0 => 90.0 | 12, 30 => 165.0
traffic_light(color: str) -> str | the color that comes next in the cycle green, yellow, red | "green" => "yellow" | "red" => "green"
rock_paper_scissors(a: str, b: str) -> str | "first", "second" or "draw" for one round of the game \
| "rock", "scissors" => "first" | "paper", "paper" => "draw"
tic_tac_toe_winner(board: list[str]) -> str | the player with three in a row on a board of three strings, \
or "" | ["XXX", "OO ", "   "] => "X" | ["   ", "   ", "   "] => ""
bowling_total(rolls: list[int]) -> int | the sum of the pins plus 10 bonus points for every roll of 10 | [3, 10] => 23 | [] => 0
dice_sums(sides: int) -> dict[int, int] | how many ways two dice with that many sides \
give each total | 2 => {2: 1, 3: 2, 4: 1} | 1 => {2: 1}
knight_moves(square: str) -> list[str] | the sorted squares that a chess knight can reach from \
the given one | "a1" => ["b3", "c2"] | "h8" => ["f7", "g6"]
morse(word: str) -> str | the Morse code of a word made of the letters s and o only, \
separated by spaces | "sos" => "... --- ..." | "o" => "---"
atbash(text: str) -> str | the text with each lower-case letter replaced by its mirror in \
the alphabet | "abc" => "zyx" | "hi you" => "sr blf"
vigenere(text: str, key: str) -> str | the lower-case text shifted letter by letter by the \
letters of the key | "abc", "b" => "bcd" | "aa", "ab" => "ab"
checksum(number: str) -> bool | True if the digits pass the Luhn test | "79927398713" => True | "12" => False
parity_bit(bits: str) -> str | "1" if the number of ones in the text is odd and "0" otherwise | "1011" => "1" | "" => "0"
ip_is_valid(address: str) -> bool | True if the text is four numbers from 0 to 255 \
separated by dots | "10.0.0.1" => True | "300.1.1.1" => False
version_newer(a: str, b: str) -> bool | True if version a is newer than version b, comparing the dotted \
parts as numbers | "1.10", "1.9" => True | "2.0", "2.0" => False
bytes_to_human(n: int) -> str | the size in B, KB or MB with one decimal, using steps of 1024 | 2048 => "2.0 KB" | 10 => "10.0 B"
median_of_three(a: int, b: int, c: int) -> int | the middle one of three numbers | 3, 9, 5 => 5 | 1, 1, 2 => 1
closest_to(nums: list[int], x: int) -> int | the number in the list that is nearest to x, the \
smaller one on a tie | [1, 6, 9], 7 => 6 | [4, 8], 6 => 4
sum_of_multiples(limit: int, a: int, b: int) -> int | the sum of all numbers below limit that a or b divides | 10, 3, 5 => 23 | 3, 5, 7 => 0
alternating_sum(nums: list[int]) -> int | the first number minus the second plus the third, and so on | [5, 2, 1] => 4 | [] => 0
product_except_self(nums: list[int]) -> list[int] | a list in which each item is the product of all \
the other numbers | [1, 2, 3] => [6, 3, 2] | [4, 5] => [5, 4]
count_inversions(nums: list[int]) -> int | how many pairs stand in the wrong order for an ascending list | [3, 1, 2] => 2 | [1, 2] => 0
majority(votes: list[str]) -> str | the option with more than half of the votes, or "none" | ["a", "b", "a"] => "a" | ["a", "b"] => "none"
leaderboard(scores: dict[str, int]) -> list[str] | the names by score from high to low and alphabetically \
on ties | {"bo": 2, "al": 2, "cy": 9} => ["cy", "al", "bo"] | {} => []
merge_intervals(spans: list[list[int]]) -> list[list[int]] | the intervals with overlapping ones \
joined | [[1, 3], [2, 5], [8, 9]] => [[1, 5], [8, 9]] | [] => []
free_slots(busy: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]] | the gaps between sorted busy \
periods in a day | [(9, 10)], 8, 12 => [(8, 9), (10, 12)] | [], 1, 2 => [(1, 2)]
tree_depth(tree: dict) -> int | the depth of a tree stored as nested dictionaries with no \
keys in the leaves | {"a": {"b": {}}} => 2 | {} => 0
reachable(graph: dict[str, list[str]], start: str) -> set[str] | the nodes that can be reached from start, start \
included | {"a": ["b"], "b": []}, "a" => {'a', 'b'} | {"z": []}, "z" => {'z'}
shortest_hops(graph: dict[str, list[str]], a: str, b: str) -> int | the smallest number of edges on a path from a to b, or -1 \
| {"a": ["b"], "b": ["c"], "c": []}, "a", "c" => 2 | {"a": [], "b": []}, "a", "b" => -1
has_cycle(links: dict[int, int], start: int) -> bool | True if following the links from start visits \
some node twice | {1: 2, 2: 1}, 1 => True | {1: 2}, 1 => False
job_order(needs: dict[str, list[str]]) -> list[str] | the tasks in an order in which each comes after \
those it needs | {"b": ["a"], "a": []} => ["a", "b"] | {} => []
friend_groups(pairs: list[tuple[str, str]]) -> int | the number of separate groups of people \
connected by friendship | [("a", "b"), ("c", "d")] => 2 | [] => 0
triangle_kind(a: float, b: float, c: float) -> str | "equilateral", "isosceles" or \
"scalene" | 3, 3, 3 => "equilateral" | 2, 3, 4 => "scalene"
tax_due(income: float) -> float | 10 percent of the income up to 10000 plus 20 percent of the part above | 15000 => 2000.0 | 0 => 0.0
grade_summary(marks: dict[str, int], limit: int) -> tuple[int, int] | how many pupils reached the limit and \
how many did not | {"a": 70, "b": 40}, 50 => (1, 1) | {}, 50 => (0, 0)
parking_fee(hours: int) -> int | 4 for the first hour and 2 for every further one, at most 20 | 3 => 8 | 24 => 20
wind_label(speed: int) -> str | "calm" below 10, "breeze" below 40, and "storm" from 40 | 5 => "calm" | 40 => "storm"
sum_nested(data: list) -> int | the sum of all integers in a list that may hold further lists | [1, [2, [3]]] => 6 | [] => 0
only_strings(data: list) -> list[str] | the items of a mixed list that are strings | [1, "a", None] => ["a"] | [] => []
safe_divide(a: float, b: float) -> float | a divided by b, or None when b is zero | 6, 3 => 2.0 | 1, 0 => None
parse_duration(text: str) -> int | the number of seconds in a text such as 1h30m | "1h30m" => 5400 | "45m" => 2700
indent_lines(text: str, n: int) -> str | the text with n spaces in front of every line | "a", 2 => "  a" | "", 3 => "   "
box_text(word: str) -> list[str] | three lines that draw a box of stars around the word | "hi" \
=> ["****", "*hi*", "****"] | "a" => ["***", "*a*", "***"]
diamond_widths(n: int) -> list[int] | the odd widths from 1 up to n and back down to 1 | 5 => [1, 3, 5, 3, 1] | 1 => [1]
multiplication_row(n: int, upto: int) -> list[int] | the products of n with 1 up to the given number | 3, 4 => [3, 6, 9, 12] | 7, 1 => [7]
""")

COMPLETE_ASKS = rows("""
Fill in the body of this Python function.
Please implement the function below.
Write the missing body so that the function does what its docstring says:
Here is a function stub. Can you finish it?
I only have the signature and the docstring. Please write the implementation.
Finish this Python function and return the whole thing in a code block.
Implement this. Keep it short and readable.
The function below is empty. Provide working code for it and explain the idea in a sentence or two.
Turn this stub into working Python:
My tests call the following function, but it has no body yet. Please add one.
Give me a correct implementation, with no extra text.
Implement the following without importing any module:
Could you write the code for this function and mention its time complexity?
""")
WRITE_ASKS = rows("""
Write Python code for a function which returns {d}.
Write a Python function called `{f}` that returns {d}. Include a docstring.
I need a Python helper named `{f}` which returns {d}. For example, `{f}({a})` should give `{r}`.
How would you compute {d} in Python? Show a function and explain it.
Create `{f}({p})` in Python. It should return {d}. Add two assertions that test it.
Can you write a function `{f}` returning {d}? Please comment each line.
Show two different ways in Python to get {d}, and say which one you prefer.
Write unit tests with pytest for a function `{f}({p})` that returns {d}.
Explain how to code a function whose result is {d}, as if to somebody in a first programming course.
What edge cases should I think about for a function that returns {d}? Give the final Python code too.
""")

SNIPPETS = blocks("""
squares = {n: n * n for n in range(10) if n % 2}

total = sum(len(w) for w in text.split() if w.isalpha())

a, b = b, a + b

print(*sorted(set(names), key=str.lower), sep=", ")

first, *rest = values

pairs = list(zip(xs, xs[1:]))

matrix = [[0] * 3 for _ in range(3)]

best = max(scores, key=scores.get)

lines = [ln.rstrip() for ln in open("log.txt")]

x = x if x > 0 else -x

counts = {}
for ch in word:
    counts[ch] = counts.get(ch, 0) + 1

while n:
    n, r = divmod(n, 10)
    print(r)

def gen(n):
    while n > 0:
        yield n
        n //= 2

def append_to(a, b=[]):
    b.append(a)
    return b

def fact(n):
    return 1 if n < 2 else n * fact(n - 1)

try:
    age = int(input())
except ValueError:
    age = None

with open("data.json") as fh:
    data = json.load(fh)

for i, name in enumerate(names, start=1):
    print(i, name)

class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __add__(self, o):
        return Point(self.x + o.x, self.y + o.y)

def timer(fn):
    def inner(*args):
        t = time.time()
        out = fn(*args)
        print(time.time() - t)
        return out
    return inner

stack = [root]
while stack:
    node = stack.pop()
    print(node.value)
    stack.extend(node.children)

queue = deque([start])
seen = {start}
while queue:
    cur = queue.popleft()
    for nxt in graph[cur]:
        if nxt not in seen:
            seen.add(nxt)
            queue.append(nxt)

lo, hi = 0, len(a)
while lo < hi:
    mid = (lo + hi) // 2
    if a[mid] < x:
        lo = mid + 1
    else:
        hi = mid

for i in range(len(a)):
    for j in range(i + 1, len(a)):
        if a[j] < a[i]:
            a[i], a[j] = a[j], a[i]

memo = {}
def ways(n):
    if n < 0: return 0
    if n == 0: return 1
    if n not in memo:
        memo[n] = ways(n - 1) + ways(n - 3)
    return memo[n]

merged = {**defaults, **options}

text[::-1].casefold() == text.casefold()

is_odd = bool(n & 1)

mask = (1 << k) - 1

lookup = dict(enumerate("abc"))

evens = list(filter(lambda v: v % 2 == 0, nums))

doubled = list(map(lambda v: v * 2, nums))

copy = grid[:]
copy[0][0] = 9
print(grid[0][0])

print(0.1 + 0.2 == 0.3)

words.sort(key=lambda w: (len(w), w))

any(n % d == 0 for d in range(2, n))

found = re.findall(r"[a-z]+@[a-z]+", page)

parts = line.strip().split(",", 2)

total = 0
for n in nums:
    if n < 0:
        continue
    total += n
    if total > 100:
        break

groups = defaultdict(list)
for w in words:
    groups[w[0]].append(w)

def apply(f, n):
    return lambda x: x if n == 0 else apply(f, n - 1)(f(x))

flags = [False] * 26
for c in s:
    flags[ord(c) - 97] = True

result = next((u for u in users if u.active), None)

assert len(keys) == len(values), "lengths differ"

f"{price:,.2f} for {name!r:>10}"

random.seed(7)
hand = random.sample(deck, 5)
""")
EXPLAIN_ASKS = rows("""
Explain this code line by line:
What does this Python code do?
I found this in an old project. Can you tell me what it does and whether it could be written better?
Describe the following code to a beginner.
Rewrite this with clear variable names and comments:
What would happen if the input were empty? Explain with reference to this code:
Is there a bug or a risk in this snippet? Discuss it.
Show a longer version of this code that is easier to read:
Name the Python features used here and explain each of them.
""")

PROGRAMS = items("""
    renames all photos in a folder by their date; reads a CSV file of expenses and prints the total per category; plays a number guessing
    game; keeps a to-do list in a text file; counts the words in every text file of a folder; downloads a web page and prints all its
    links; draws a bar chart with characters; simulates rolling two dice a thousand times; converts a Markdown list into HTML; finds
    duplicate files by their hash; prints a calendar for a month; quizzes the user on capital cities; generates a random password; plays
    hangman; solves a sudoku by backtracking; simulates the game of life; counts down to a date; turns a sentence into Morse code; backs
    up a folder into a zip file; checks whether a website is up; computes a loan repayment table; tracks daily water intake; shuffles and
    deals a deck of cards; prints a times table; converts between currencies from a table of rates; parses a log file and lists the most
    frequent errors; merges several CSV files into one; shows a progress bar; implements a stopwatch; sorts a playlist by artist and year;
    stores contacts in a JSON file; models a bank account with a class; implements a stack and a queue; implements a linked list with
    insertion and deletion; builds a binary search tree; implements a least recently used cache; simulates a vending machine; simulates a
    queue in a supermarket; plays tic-tac-toe against the user; estimates pi with random points; finds the shortest path in a maze; fits a
    straight line to points; implements k-means on two-dimensional points; trains a tiny perceptron; generates sentences with a Markov
    chain; encrypts a text file with a password; compares two text files and prints the differences; scrapes headlines and saves them;
    schedules reminders; prints the weather from a JSON reply
""")
PROGRAM_ASKS = rows("""
Write a Python script that {d}.
Write a small command-line program in Python that {d}, using argparse.
How would you design a program that {d}? List the functions first, then write the code.
I am learning Python. Help me build something that {d}, one step at a time.
Write a Python class and a short demo for a program that {d}.
What modules of the standard library help with a program that {d}? Show an example.
""")

# ---------------------------------------------------------------------------------------------------------------------
# Chat: topics and frames, {t} is the topic.

STEM = items("""
    photosynthesis; plate tectonics; black holes; the water cycle; DNA replication; vaccines; antibiotic resistance; natural selection;
    the periodic table; radioactive decay; superconductors; lasers; fibre optics; batteries; hydrogen fuel cells; wind turbines; nuclear
    fusion; the greenhouse effect; ocean acidification; coral bleaching; tides; lightning; rainbows; tornadoes; auroras; comets; dark
    matter; the expansion of the universe; gravitational waves; neutron stars; the life cycle of stars; the seasons; eclipses; Newton's
    laws of motion; friction; buoyancy; entropy; heat pumps; refrigerators; jet engines; bridges; earthquakes; volcanoes; soil erosion;
    fermentation; enzymes; the immune system; blood types; the human heart; sleep cycles; the nervous system; memory in the brain;
    hormones; digestion; muscle growth; genetic inheritance; gene editing; stem cells; viruses; bacteria; fungi; pollination; bird
    migration; echolocation; camouflage in animals; bees and their hives; ant colonies; deep-sea life; mangroves; rainforests; wetlands;
    food webs; acids and bases; chemical bonds; catalysts; crystals; plastics; soap; rust; combustion; alloys; glass making; concrete;
    water purification; prime numbers; probability; Bayes' theorem; standard deviation; correlation and causation; logarithms; exponential
    growth; derivatives; integrals; matrices; vectors; complex numbers; infinity; game theory; graph theory; fractals; the Pythagorean
    theorem; binary numbers; sorting algorithms; recursion; hash tables; public-key encryption; databases; operating systems; the
    internet; web browsers; cloud computing; machine learning; neural networks; language models; computer graphics; compilers;
    blockchains; error-correcting codes; digital cameras; GPS; radar; microwave ovens; touch screens; 3D printing; drones; electric
    motors; transistors; solar panels; semiconductors; sound waves; musical scales; optical illusions; color vision; lenses and
    microscopes; magnetism; static electricity; radio waves; atomic structure; quantum entanglement; special relativity; pressure and
    boiling points; cloud formation; glaciers
""")
STEM_ASKS = rows("""
Explain {t} to a ten-year-old.
How do scientists study {t}?
What are three common misconceptions about {t}?
Explain {t} with an everyday analogy.
Describe {t} in exactly three paragraphs.
Write five quiz questions about {t}, with answers.
What should a student know about {t} before an exam?
Give me a short history of how people came to understand {t}.
Why is it useful in daily life to know about {t}?
List the key terms needed to talk about {t} and define each one.
Suggest a simple home or classroom activity that shows something about {t}.
What is still unknown or debated about {t}?
Summarize {t} in two sentences.
Walk me through {t} step by step.
Write a dialogue in which a teacher explains {t} to a curious pupil.
What are the practical applications of {t}?
I read about {t} but did not understand it. Where should I begin?
How would you explain {t} to somebody with a degree in law and no science background?
Give an advanced explanation of {t}, and then a one-line version.
Make a table with the main facts about {t}.
""")
HUMANITIES = items("""
    the fall of the Roman Empire; the Silk Road; the Black Death; the printing press; the Renaissance in Florence; the French Revolution;
    the Haitian Revolution; the Industrial Revolution; the abolition of slavery; the Meiji Restoration; the Opium Wars; the Mali Empire;
    the Inca road system; ancient Egyptian burial; the city-states of Greece; the Persian Empire; the Vikings; feudalism; the Crusades;
    the Magna Carta; the Mongol Empire; the Ottoman Empire; the voyages of Zheng He; the Columbian exchange; colonialism in Africa; the
    partition of India; the Great Depression; the causes of the First World War; the Treaty of Versailles; the Cold War; the fall of the
    Berlin Wall; apartheid in South Africa; the civil rights movement; women's suffrage; the space race; decolonization; the European
    Union; the United Nations; the Bretton Woods system; inflation; unemployment; supply and demand; monopolies; the minimum wage;
    taxation; central banks; interest rates; free trade; tariffs; stock markets; insurance; public goods; universal basic income; housing
    prices; microfinance; behavioural economics; opportunity cost; comparative advantage; recessions; national debt; exchange rates;
    income inequality; labour unions; globalization; the gig economy; democracy; federalism; constitutional monarchy; freedom of speech;
    human rights; the separation of powers; propaganda; voting systems; citizenship; immigration; urbanization; stoicism; utilitarianism;
    existentialism; Confucian ethics; Plato's cave; the trolley problem; free will; the social contract; Buddhism; the Reformation;
    comparative religion; myths of the Norse gods; Greek tragedy; Shakespeare's comedies; the epic of Gilgamesh; magical realism; haiku;
    the Gothic novel; dystopian fiction; fairy tales; oral storytelling; jazz; opera; the blues; flamenco; Baroque music; Impressionism;
    Cubism; Islamic calligraphy; cave paintings; Gothic cathedrals; Bauhaus; photography as art; silent film; museum collections; the
    history of theatre; the origin of writing; dialects and accents; endangered languages; sign languages; etiquette across cultures; the
    history of tea; the spice trade; coffee houses; the history of chess; the Olympic Games; calendars; paper money; the postal service;
    railways in the nineteenth century; public libraries; compulsory schooling; the history of medicine; maps and mapmaking; nomadic
    peoples; the Gold Rush; prohibition; the Harlem Renaissance; the Dust Bowl
""")
HUMANITIES_ASKS = rows("""
Explain where {t} came from and what followed from it.
Give a balanced overview of {t}.
Explain {t} to a teenager who finds the subject boring.
Who are the most important people connected with {t}, and why?
Write a short essay on {t}.
Why do people still talk about {t} today?
What are the strongest arguments in debates about {t}?
Draft a ten-minute lesson plan on {t}.
How did {t} change the lives of ordinary people?
Suggest three thesis statements for a paper about {t}.
What is one surprising fact about {t}, and what does it tell us?
Make a timeline or a list of key points about {t}.
How might two scholars disagree about {t}?
Describe {t} from the point of view of somebody living through it or using it.
Summarize {t} in under 80 words.
What questions should I ask in a seminar on {t}?
How does {t} relate to the modern economy?
Recommend a way to start reading about {t}.
Compare {t} with a similar thing from another place or time.
""")
HOWTO = items("""
    start a vegetable garden on a balcony; repair a flat bicycle tyre; learn to play the ukulele; prepare for a job interview; sleep
    better; save money on groceries; train a puppy to sit; bake sourdough bread; remove a coffee stain from a shirt; organize a small
    wardrobe; write a CV without experience; plan a camping trip; make friends in a new city; run five kilometres; learn Spanish in a
    year; set up a home office; give a toast at a wedding; prepare for a marathon; negotiate a salary; apologize sincerely; care for a
    cactus; keep bees; make compost; paint a room; hang a shelf; sharpen a kitchen knife; cook rice well; poach an egg; brew coffee in a
    French press; make fresh pasta; pack a suitcase; survive a long flight; take good photos with a phone; start a book club; run a
    meeting; handle criticism; stop procrastinating; study for a chemistry exam; memorize a speech; read faster; take useful notes; build
    a birdhouse; knit a scarf; sew on a button; iron a shirt; tie a tie; fold a paper boat; juggle three balls; swim front crawl; do a
    proper push-up; meditate for the first time; reduce screen time; protect passwords; back up a computer; clean a keyboard; speed up a
    slow laptop; choose a mattress; buy a used car; change a car tyre; jump-start a car; read a map; use a compass; put up a tent in the
    rain; build a campfire safely; treat a small burn; deal with a nosebleed; help a friend who is sad; talk to a teenager about money;
    plan a birthday party for children; host a dinner for eight; choose a wine or a soft drink for a meal; start a podcast; write a short
    story; edit a video; learn touch typing; create a monthly budget; pay off a credit card; invest a small sum; file a complaint with an
    airline; rent a first apartment; move house without stress; get rid of ants; unclog a sink; save water at home; lower an electricity
    bill; recycle electronics; volunteer abroad; adopt a cat; introduce a cat to a dog; teach a child to read;
""")
HOWTO_ASKS = rows("""
How do I {t}?
Give me step-by-step instructions to {t}.
What mistakes do beginners make when they try to {t}?
I have one weekend and very little money. Help me {t}.
Make a checklist for somebody who wants to {t}.
What tools or materials do I need to {t}?
Explain to a complete beginner how to {t}, in fewer than 120 words.
I tried to {t} and it went wrong. What might I have missed?
Teach me to {t} as if you were a patient neighbour.
Plan four weeks of practice for a person who would like to {t}.
""")
PAIRS = items("""
    cats and dogs as pets; city life and country life; tea and coffee; e-books and paper books; renting and buying a home; trains and
    planes; electric cars and petrol cars; Python and Java; Linux and Windows; SQL and NoSQL databases; yoga and weight training; cycling
    and running; novels and films; online classes and classroom teaching; freelancing and permanent jobs; cash and card payments; beach
    holidays and mountain holidays; frogs and toads; crocodiles and alligators; butterflies and moths; mitosis and meiosis; arteries and
    veins; weather and climate; mass and weight; speed and velocity; fission and fusion; viruses and bacteria; planets and stars; comets
    and asteroids; rocks and minerals; fruit and vegetables in botany; butter and olive oil; baking soda and baking powder; brown rice and
    white rice; gas and induction stoves; wood and steel in building; capitalism and socialism; republics and monarchies; civil law and
    common law; the Roman and the Greek gods; the Aztecs and the Incas; Athens and Sparta; Impressionism and Expressionism; jazz and
    classical music; poetry and prose; comedy and tragedy; fables and myths; introverts and extroverts; leaders and managers; ethics and
    law; knowledge and belief; stocks and bonds; debit cards and credit cards; fixed and variable interest rates; start-ups and large
    companies; remote work and office work; handwriting and typing; solar power and wind power; tap water and bottled water; board games
    and video games; public transport and private cars; homeschooling and public school; zoos and wildlife reserves; supervised and
    unsupervised learning; stacks and queues; lists and tuples in Python; compiled and interpreted languages; HTTP and HTTPS; RAM and hard
    disks; TCP and UDP; AC and DC electricity; acrylic and oil paint; violins and cellos
""")
PAIR_ASKS = rows("""
Compare {t} in a few short paragraphs.
What are the main differences between {t}? Use a table.
Give two similarities and three differences between {t}.
Help me decide: list the pros and cons of {t}.
Explain the difference between {t} to a child.
Write a short, funny debate about {t}.
Which is better for a busy person: {t}? Justify your answer, or say why the question makes no sense.
When does the difference between {t} matter in practice?
""")
SUBJECTS = items("""
    a lighthouse keeper who finds a message; the last train of the night; a city where nobody sleeps; a violin that remembers its owners;
    a lost umbrella; the first snow of the year; an old map with a mistake; a robot that learns to garden; two rivals in a pie contest; a
    bakery at dawn; a family moving to another continent; a dragon afraid of fire; a clock that runs backwards; a librarian with a secret;
    a summer on a farm; the smell of rain; a forgotten birthday; a letter that arrives forty years late; a ship in a bottle; a neighbour's
    noisy parrot; a mountain village without internet; a teacher's last day; a ghost who hates haunting; a street musician; an empty
    playground; a broken promise; the ocean at night; a long drive across a desert; learning to forgive; an unexpected inheritance; a
    colony on Mars; the invention of a new color; a dog that waits at the station; a chess game between strangers; a power cut in a
    skyscraper; grandmother's recipe book; the courage to say no; autumn in an old orchard; a detective who cannot lie; a market in a
    harbour town; time travel gone slightly wrong; a friendship between a fox and a goose; the joy of small habits; a museum after closing
    time; a marathon runner in last place; a bridge between two quarrelling towns; a very polite pirate; growing up with five siblings;
    the view from a night bus; a garden on a rooftop; a storm at sea; a school play that goes wrong; a scientist who talks to trees; being
    alone in a foreign city; a coin passed from hand to hand; the sound of a piano next door; a wedding in the rain; the end of a long
    friendship; a treasure hunt in a library; moving from paper to screens; working from home with children; a slow weekend in a small
    town; street food; the value of boredom; hiking alone; learning a language at sixty; living with less; friendship in the age of
    phones; public parks; a restaurant with only one table; a noise-cancelling headset; a budget hotel near an airport; a documentary
    about whales; a novel about a family of clockmakers; a museum of toys; a running shoe; a cooking app; a folk concert; a train journey
    through the Alps; a week in Istanbul; food markets in Mexico City; a road trip around Iceland; temples in Kyoto; a weekend in
    Edinburgh; a safari in Botswana; islands of Greece; winter in Quebec; cycling in the Netherlands; a river cruise on the Danube
""")
WRITING_ASKS = rows("""
Write a short story about {t}.
Write a poem of four stanzas about {t}.
Write a haiku and then a limerick about {t}.
Write the opening paragraph of a novel about {t}.
Write a blog post about {t} with a catchy title.
Write a thoughtful essay of about 300 words inspired by {t}.
Write a review, serious or humorous, of {t}.
Write a scene with only dialogue about {t}.
Write a diary entry about {t}.
Write a newspaper report about {t}.
Write a bedtime story for a five-year-old about {t}.
Write song lyrics, with a chorus, about {t}.
Write a letter to a friend about {t}.
Describe {t} using all five senses.
Write a story about {t} in exactly six sentences.
Write a short speech about {t}.
Write a free-verse poem about {t} that never uses the word "the".
Write a surprising final paragraph for a story about {t}.
Write a social media post of at most 50 words about {t}.
Write a story in the second person about {t}.
Give me three possible titles and a blurb for a book about {t}.
Write a product or event description about {t} for a brochure.
Write a monologue for an actor about {t}.
""")
EMAILS = items("""
    asking a landlord to repair the heating; inviting colleagues to a farewell lunch; thanking a mentor for advice; declining a job offer
    politely; asking for an extension of a deadline; complaining about a late delivery; applying for a summer internship; requesting a
    refund for a cancelled concert; announcing a change of office hours; apologizing to a customer for a wrong invoice; asking a professor
    for a reference; reminding a client of an unpaid bill; introducing a new team member; proposing a shared carpool; asking neighbours to
    keep the stairs clear; congratulating a colleague on a promotion; cancelling a gym membership; reporting a lost suitcase; asking a
    library to buy a book; inviting a speaker to a school; telling the team that a project is delayed; asking for feedback on a
    presentation; resigning from a job; requesting a day off for a family event; offering to volunteer at a food bank; asking a hotel
    about a late arrival; selling a used piano; explaining a price increase to customers; asking parents to help with a school fair;
    following up after an interview; negotiating a better price with a supplier; asking a city council for a bike lane; recommending a
    former employee; telling a friend that you cannot come to the wedding; asking IT for help with a broken laptop; planning a family
    reunion; thanking donors of an animal shelter; asking an author for an interview; announcing a charity run; correcting an error in a
    newsletter
""")
EMAIL_ASKS = rows("""
Write an email {t}.
Write a short, friendly email {t}. Sign it as {A}.
Draft a formal email {t}, with a subject line.
Write an email to {A} {surname} {t}. Keep it under 100 words.
Write two versions of an email {t}: one casual and one formal.
Give me a template for an email {t}, with blanks for the details.
Improve my plan for an email {t}: what should I say first, and what should I leave out? Then write it.
""")
PERSONAS = items("""
    a medieval blacksmith; a ship's cook in 1780; an astronaut on a space station; a grumpy wizard; a tour guide in ancient Rome; a
    detective from the 1930s; a talking oak tree; a nervous stand-up comedian; a chess grandmaster; a deep-sea diver; a village doctor; a
    robot butler; a famous pastry chef; a football coach at half-time; a wise grandmother; a pirate captain; a museum night guard; a time
    traveller from the year 2500; a kindergarten teacher; a strict music teacher; a cat who rules a household; a beekeeper; a lighthouse
    keeper; a travel agent for ghosts; a mountain guide; a court jester; an alien visiting a supermarket; a sports commentator; a
    librarian who loves rules; a fashion designer; an economist who loves metaphors; a gentle therapist; a career adviser; a physics
    professor; a customer support agent; an old sailor; a talking refrigerator; a judge in a court for animals; a radio host; a mayor of a
    tiny town; a marathon coach; a history teacher; a wildlife photographer; a poet who only likes Mondays; an inventor of useless
    machines; a nurse on a night shift; a taxi driver in a big city; a garden gnome; a vampire trying to become a vegetarian; a knight
    with hay fever
""")
ROLE_ASKS = rows("""
You are {t}. Introduce yourself and describe your day.
Pretend to be {t} and give me advice about my first day at a new job.
Act as {t}. I am bored and want a hobby: what do you suggest?
Stay in character as {t} and tell me what you think about smartphones.
Imagine you are {t} who has just won a lottery. What do you say to the press?
You are {t}, and I have come to complain about the weather. Answer me.
Speak as {t}: what was the biggest mistake of your life?
Act as {t} and explain how to make a good soup.
As {t}, write a short letter to your younger self.
Play the role of {t}. Tell me a joke and then a piece of wisdom.
You are {t} being interviewed. Question: what do people get wrong about you?
Take the part of {t} and comfort a friend who failed an exam.
Be {t} and explain how money works.
Answer as {t}: what is the secret of happiness?
You are {t}. Give a motivational speech to a tired team.
Pretend that you are {t} and describe the place where you live.
As {t}, argue that everyone should learn to cook.
You are {t} on a first visit to a gym. Tell the story.
""")
PLANS = items("""
    names for a small bakery; gifts for a colleague who is retiring; ways to use leftover rice; icebreakers for a team of strangers;
    themes for a school party; ideas for a science fair; side jobs for a student; ways to cheer up a sick friend; titles for a cooking
    show; apps that could help elderly people; uses for an empty shop; slogans for a bicycle campaign; ways to cut food waste; rainy-day
    games for children; story ideas set in a desert; questions for a podcast about work; topics for a debating club; healthy snacks for
    the office; ways to make a commute pleasant; features for a smart umbrella; names for a rescue dog; low-cost dates; family traditions
    to start; ways to attract birds to a garden; features for a small town festival; ways to practise speaking French alone; fundraisers
    for a sports club; exercises that need no equipment; ways to decorate a rented room; activities for a long train ride; ideas for a
    newsletter of a local library; experiments with ice; board game concepts; ways to thank a teacher; habits for better focus; breakfast
    ideas without eggs; small acts of kindness; weekend trips without a car; new holidays that the world needs; inventions for lazy
    people; ways to learn statistics; names for a fantasy kingdom; mystery plots without a murder; ways to save paper in a school; first
    lines for a love story; costumes made from cardboard; lessons that a cat could teach; ways for a shop to win back customers; questions
    for a job applicant; projects for a beginner in electronics
""")
PLAN_ASKS = rows("""
Brainstorm ten {t}.
Give me five unusual {t}, each with one sentence of explanation.
I need {t}. Ask yourself what matters, then list your best three.
List {t}, from the cheapest or simplest to the most ambitious.
Suggest seven {t} and mark your favourite.
What are some good {t}? Avoid the obvious ones.
Help me with {t}: propose a few and explain how to choose among them.
""")
OPINIONS = items("""
    schools should start later in the morning; homework does more harm than good; museums should be free; cities should ban cars from
    their centres; social media makes people lonely; everyone should learn to code; zoos are no longer needed; a four-day working week is
    a good idea; children should have phones; art should be part of every curriculum; voting should be compulsory; space travel is worth
    its cost; fast fashion should be taxed; tipping should disappear; grades motivate pupils; robots will take most jobs; nuclear power is
    needed for the climate; tourism harms old cities; reading fiction makes people kinder; sport is overrated; handwriting still matters;
    fame is a burden; privacy is dead; failure is the best teacher; money can buy happiness; competition is healthy for children;
    advertising to children should be forbidden; people should eat less meat; animals have rights; every student should spend a year
    abroad; cash should be kept; public libraries are outdated; history repeats itself; technology makes us lazy; small talk is useful;
    pets should be allowed in offices; internships must be paid; the driving age should be raised; streaming has improved music; uniforms
    belong in schools; exams should be open-book; old buildings should be preserved at any cost; artificial intelligence should not write
    news; patience is the most important virtue; travel broadens the mind; lying can be right; talent matters less than practice;
    tradition holds societies together
""")
OPINION_ASKS = rows("""
Some people say that {t}. Do you agree?
Write a persuasive paragraph claiming that {t}.
Argue against the claim that {t}.
Give both sides of the statement that {t}, then a careful conclusion.
My friend insists that {t}. How could I answer respectfully?
What evidence would help to decide whether {t}?
Write a short dialogue between two people who disagree on whether {t}.
List three reasons for and three reasons against the view that {t}.
""")
CONTEXTS = rows("""
This is for a school newsletter.
I have about two minutes to read the answer.
Please use simple words.
I am preparing a short presentation, so structure matters.
Please be honest where opinions differ.
My audience is a group of retired people who enjoy surprises.
Use a warm and slightly humorous tone.
Finish with one question for me.
Start with the most important point.
Include at least one concrete example.
English is my second language.
I already know the basics, so go a bit deeper.
""")
OUTLINE_ASKS = rows("""
Draft an outline for an article about {t}.
Outline a 15-minute talk on {t}, with a time for each part.
Write a table of contents for a beginner's book on {t}.
Sketch a five-part video series about {t}.
Make a study plan for two weeks on {t}.
Plan a workshop on {t} for twelve people, with activities.
Write an outline with three main sections and two subsections each on {t}.
""")

# ---------------------------------------------------------------------------------------------------------------------
# Chat frames that draw their details with ``fill``.

PUZZLES = rows("""
{A} is older than {B}, and {B} is older than {C}. Who is the youngest? Explain how you know.
{A}, {B} and {C} each own a different pet: a cat, a dog or a parrot. {A} is allergic to fur, and {C} does not like dogs. Who owns which pet?
In a race, {A} finished before {B} but after {C}. {D} finished right behind {B}. Give the complete order.
If all {toy} in the box are {color}, and this thing is not {color}, can it come from the box? Explain.
Some {animal} are {color}. Everything {color} is rare. Does it follow that some {animal} are rare? Why?
It is {day} today. What day of the week will it be in [n:15-120] days?
Which number comes next: [a:2-9], [a*2+1], [a*4+3], [a*8+7]? Give the rule.
A sequence starts at [a:1-9] and grows by [d:3-9] each time. What is its [n:8-30/4]th term? Give a formula.
A farmer has a fox, one of his {animal} and a bag of corn, and a boat for himself and one of \
them. How does he cross the river without losing anything?
I have [n:3-6] boxes. Each contains [m:2-5] smaller boxes, and each of those contains a {gadget}. How many boxes are there in total?
{A} says that {B} always lies. {B} says that {C} always lies. {C} says nothing. Can all \
three statements and the silence be consistent? Discuss.
You have a [a:3-4]-litre jug and a [b:5-7]-litre jug, and plenty of water. Which amounts can you measure? Give the steps for one of them.
{A} faces north, turns right twice and then left once. Which direction does {he} face now?
{A} walks [a:3-9] blocks north, [b:2-8] blocks east and [a] blocks south. How far and in which direction is {he} from the start?
There are [a:4-12] {color} socks and [a] {color2} socks in a dark drawer. How many must {A} take to be sure of a matching pair?
If it rains, the {sport} match is cancelled. The match was not cancelled. What can you say about the rain?
A lily doubles in size each day and covers a pond after [n:20-60] days. When did it cover a quarter of the pond?
{A}'s mother has four children. Three of them are called {B}, {C} and {D}. What is the fourth child's name? Explain.
Find the odd one out and explain: {fruit}, {fruit2}, {gadget}, {fruit3}.
Five people sit in a row: {A} is at the left end, {B} is in the middle, {C} sits next to {A}, and {D} is not at the right end. Where is {D}?
A {gadget} and its case cost $[n:11-99] together. The {gadget} costs $10 more than the case. \
What does the case cost? Explain the usual wrong answer too.
If [n:3-9] workers need [n] hours to build [n] walls, how long do [m:20-90/10] workers need for [m] walls?
Is the following argument valid? "Everybody from {city} likes {drink}. {A} likes {drink}. So {A} is from {city}." Explain.
{A} holds two US coins worth 30 cents together, and one of them is no quarter. Which coins are they? Reason aloud.
How many times does the digit [d:1-9] appear in the numbers from 1 to [n:30-100/10]?
Arrange these in order of size and explain the scale: a {vehicle}, one of several {small}, a {gadget}, and {city}.
{A} looks at a portrait and says: "I have no brothers or sisters, but the father of this \
person is my father's child." Who is in the portrait?
What is wrong with this reasoning: "I wore {color} socks and we won at {sport}; therefore the socks help us win"?
Imagine that everyone in {city} gave up cars for a year. What would happen first, second and third? Reason it through.
A meeting of [n:5-14] people begins with everybody shaking hands with everybody else once. How many handshakes are there?
Decode this: each letter was replaced by the letter after it in the alphabet, and the result \
is "{code}". What was the word? Explain how you found it.
Three switches downstairs control one lamp in {A}'s attic. {He} may go up just once. How does {he} find the right switch?
If yesterday was two days before {day}, what day is tomorrow? Think carefully.
A clock in {city} strikes [n:4-6] times in [m:6-12] seconds. How long does it take to strike twelve times? Assume equal pauses.
{A} bought a {gadget} for $[a:50-90/10], sold it for $[b:100-140/10], bought it back for $[c:150-190/10] \
and sold it for $[d:200-240/10]. Did {he} gain or lose, and how much?
""")
POOLS["code"] = items("""
    dbu; usff; sjwfs; ipvtf; tupof; dmpve; csjehf; hsffo; qmbou; gmpxfs; xjoufs; tjmwfs; dboemf; nbslfu; gpsftu; qfodjm; pdfbo; tqppo;
    lfuumf
""")

TEXTS = rows("""
{A} {surname} joined {company} in [y:1998-2015] as an engineer and became its director in [2016-2023]. The firm, \
based in {city}, employs [n:120-900/20] people and makes sensors for {plant}.
Meeting notes, {day}: {A} will call the supplier in {city} by Friday, {B} prepares the budget of $[n:2-9],[100-900/100], and \
{C} books a room for [p:12-40/2] guests. The next meeting is on the [d:5-20]th of {month}.
For sale: a {color} {gadget}, used for [m:3-30] months, with a small scratch. Price $[p:40-300/10], pick-up in \
{city}. Call {A} after [h:5-8] p.m. Delivery by {vehicle} is possible for $[f:8-20].
Dear {A}, thank you for your order [o:10000-99999]. We have sent [n:2-6] {toy} and [m:1-4] boxes of {food}. They should arrive on {day}. \
Part of the order, a {color} {gadget}, is delayed until {month}. Regards, {B} {surname}, {company}
The {sport} final in {city} drew [n:4-40],000 spectators. {A} {surname} scored twice in the first half, {B} equalized after the break, \
and {C} decided the game [m:2-9] minutes before the end. It was the third title for the {color} team.
Review: We visited {city} in {month}. The hotel was clean but noisy, breakfast with {food} and {drink} cost $[p:9-24], and \
the staff, above all {A}, were wonderful. We would return, though not by {vehicle}.
Patient {A} {surname}, aged [n:19-84], reports a headache for [d:2-9] days and poor sleep. No fever. \
Advice: rest, water, and a new appointment on {day}. Doctor: {B} {surname2}.
{company} said on {day} that its revenue rose [p:3-28]% to $[r:20-95] million, while costs fell slightly. Its head, {A} \
{surname}, plans a new site in {city} with [j:40-300/20] jobs. Shares gained [s:1-6]%.
To make the soup, fry two onions, add [n:300-900/100] grams of {fruit} and a litre of stock, and simmer for [m:20-45/5] \
minutes. Season with salt and lime. It serves [s:3-8] and keeps for [d:2-4] days in the fridge.
The festival of {city} began in [y:1890-1970] when farmers traded {animal} for {craft}. Today some [n:5-60],000 visitors come \
each {month} to hear music, drink {drink} and watch a parade of lanterns led by {A} {surname}.
The old mill on the river was bought by {A} in [y:1985-2019] and turned into {shop}. A flood in {month} damaged the ground \
floor, and repairs worth $[n:12-80],000 are being paid for by neighbours selling {craft}.
From: {A} | To: {B} | Topic: trip to {city}. The {vehicle} leaves at [h:6-9]:[m:10-50/10] a.m. from the main square. Bring {food}, \
{drink} and a raincoat. {C} has the tickets; each costs $[p:11-48]. We are back by {day} evening.
Researchers from {city} followed [n:200-900/50] adults for [y:2-8] years. Those who walked at least [m:20-50/10] minutes a day slept \
longer and reported less stress. {A} {surname}, who led the work, warns that the study does not prove a cause.
The new library opens on {day} with [n:8-60],000 volumes, a cafe serving {drink} and a room for {craft} workshops. Director \
{A} {surname} hopes for [v:300-900/100] visitors a day. Membership is free until {month}.
Lost near the station: a {color} bag with [n:2-9] {small}, a {genre} book and a key. It belonged to {A}'s late aunt. The \
finder receives $[r:20-90/10]. Please contact {B} {surname} at {shop} on Harbour Street.
Customer comments: "The {gadget} is light and quick" ({A}). "Mine broke after [n:2-9] weeks" ({B}). "Good \
price, slow delivery" ({C}). "I bought a second one in {color}" ({D}).
""")
EXTRACT_ASKS = rows("""
List all the names of people and places in this text:
Extract the key facts from this text as JSON:
Which numbers occur in the following text, and what does each stand for?
Read the text and answer: who is involved, what happened, and when?
Turn this text into a table with two columns:
From the text below, pick out every date, weekday or month and every amount of money:
Write three questions that this text answers, together with the answers:
Classify the tone of this text as positive, negative or neutral, and quote the words that show it:
What is missing from this text that a reader would want to know?
Extract the five most important keywords:
""")
SUMMARY_ASKS = rows("""
Summarize this in one sentence:
Write a headline of at most eight words for this text:
Rewrite the following for a child:
Rewrite this text in a more formal style:
Shorten this to about half of its length:
Turn the following into a cheerful message to a friend:
Rewrite this as a short news item with a title:
Give the main point and two details of this text as bullet points:
""")
CHAT_EXTRA = rows("""
Hi! How are you today? Suggest one small thing that could make this {day} better.
I am visiting {city} for [n:2-6] days in {month}. What should I plan?
Tell me something interesting about {city}.
I have only {food}, {fruit} and some rice at home. What can I cook?
My friend {A} is moving to {city} to work as a {job}. What should I write on the card?
What questions should I ask a {job} before hiring one?
Recommend a way to get into {genre} books.
I want to give {A} a {gadget} for {his} birthday. What should I look for?
Invent a short myth that explains why {animal} exist.
Write an advertisement for {craft} made in {city}.
What does a normal working day of a {job} look like?
How do {sport} players train, and how could I start?
My {plant} look sad this {month}. What may be wrong?
Write a riddle whose answer is one of these: {gadget}, {fruit}, {vehicle}.
Describe the color {color} to someone who has never seen it.
Give me a simple recipe for {drink} and a story behind it.
Write a polite text message to {A}, who still has my {gadget}.
Create a fictional character called {A} {surname} who works as a {job} in {city}.
Plan a dinner for [n:3-9] guests around {fruit} and {food}, with a shopping list.
What could a shop that sells only {craft} do to survive?
Make up a dialogue between {A}, a {job}, and {B}, who is buying a {gadget}.
Write four rhyming lines about {animal} and {drink}.
Name some advantages of owning a {vehicle} and some reasons not to.
Suppose {company} wants to open an office in {city}. What should it consider?
How would you explain the rules of {sport} to a visitor from another planet?
""")

# ---------------------------------------------------------------------------------------------------------------------
# Filling templates.

SLOT = re.compile(r"\[([^\[\]]+)\]|\{(\w+?)(\d?)(!?)\}")


def draw_number(spec: str, rng: random.Random, known: dict[str, int]) -> int:
    """Draw ``name:low-high/step`` (name and step optional), or evaluate a sum of products of names and integers."""
    match = re.fullmatch(r"(?:(\w+):)?(\d+)-(\d+)(?:/(\d+))?", spec)
    if match:
        name, low, high, step = match.groups()
        value = rng.randrange(int(low), int(high) + 1, int(step or 1))
        if name:
            known[name] = value
        return value
    total = 0
    for term in spec.split("+"):
        product = 1
        for factor in term.split("*"):
            product *= int(factor) if factor.isdigit() else known[factor]
        total += product
    return total


def fill(template: str, rng: random.Random) -> str:
    """Fill the number slots in square brackets and the word slots in braces; {A} to {D} are names, {he} refers to {A}."""
    gender = rng.choice("wm")
    first = rng.choice(WOMEN if gender == "w" else MEN)
    others = rng.sample([name for name in WOMEN + MEN if name != first], 3)
    words = dict(zip("ABCD", [first, *others], strict=True)) | PRONOUNS[gender]
    words["He"] = words["he"].capitalize()
    numbers: dict[str, int] = {}
    used: dict[str, set[str]] = {}

    def substitute(match: re.Match[str]) -> str:
        spec, pool, index, capital = match.groups()
        if spec is not None:
            return str(draw_number(spec, rng, numbers))
        key = pool + index
        if key not in words:
            taken = used.setdefault(pool, set())
            words[key] = rng.choice([word for word in POOLS[pool] if word not in taken])
            taken.add(words[key])
        return words[key][0].upper() + words[key][1:] if capital else words[key]

    return SLOT.sub(substitute, template)


def endless(choices: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Go through the choices again and again, each time in a new order, so that all are used about equally often."""
    while True:
        yield from rng.sample(choices, len(choices))


# ---------------------------------------------------------------------------------------------------------------------
# One endless stream of prompts per kind.

Stream = Iterator[str]


def ask_about(asks: Sequence[str], topics: Sequence[str], rng: random.Random) -> Stream:
    """Combine frames and topics, and sometimes add a sentence of context."""
    for ask, topic in zip(endless(asks, rng), endless(topics, rng), strict=False):
        prompt = fill(ask.replace("{t}", topic), rng)
        yield f"{prompt} {rng.choice(CONTEXTS)}" if rng.random() < 0.12 else prompt


def filled(templates: Sequence[str], rng: random.Random) -> Stream:
    """Fill templates that need no topic."""
    for template in endless(templates, rng):
        yield fill(template, rng)


def math_stories(rng: random.Random) -> Stream:
    """Fill the word problems, and put some of them into a longer request."""
    wraps = endless(MATH_WRAPS, rng)
    for story in filled(MATH, rng):
        yield next(wraps).replace("\\n", "\n").replace("{q}", story) if rng.random() < 0.15 else story


def split_function(row: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Take a row of ``FUNCTIONS`` apart into its signature, its description and its examples (arguments and result)."""
    signature, about, *examples = row.split(" | ")
    pairs = [tuple(part.strip() for part in example.rsplit(" => ", 1)) for example in examples]
    return signature, about, [(args, result) for args, result in pairs]


def without_types(signature: str) -> str:
    """Remove the annotations of a signature."""
    return re.sub(r":\s*\w+(\[[^()]*?\])?(?=,|\))", "", signature.split(" -> ")[0])


def stub(row: str, rng: random.Random) -> str:
    """Write a function as a signature with a docstring, in one of several styles."""
    signature, about, examples = split_function(row)
    name = signature.split("(")[0]
    head = signature if rng.random() < 0.65 else without_types(signature)
    quotes = rng.choice(['"""', '"""', "'''"])
    verb = rng.choice(["Return", "Return", "Compute and return", "Give back"])
    style = rng.randrange(4)
    lines = [f"def {head}:", f"    {quotes}{verb} {about}."]
    for args, result in examples[: rng.choice([1, 2, 2])]:
        if style == 0:
            lines.append(f"    Example: {name}({args}) returns {result}")
        elif style == 1:
            lines.append(f"    {name}({args}) -> {result}")
        else:
            lines += [f"    >>> {name}({args})", "    " + result.replace('"', "'")]
    return "\n".join([*lines, f"    {quotes}"])


def complete_code(rng: random.Random) -> Stream:
    """Ask for the body of a function."""
    for row, ask in zip(endless(FUNCTIONS, rng), endless(COMPLETE_ASKS, rng), strict=False):
        code = stub(row, rng)
        layout = rng.randrange(4)
        if layout == 0:
            yield f"{code}\n\n{ask.replace('below', 'above').replace(':', '.')}"
        elif layout == 1:
            yield f"{ask}\n\n```python\n{code}\n```"
        else:
            yield f"{ask}\n\n{code}"


def write_code(rng: random.Random) -> Stream:
    """Ask for a function that is only described."""
    for row, ask in zip(endless(FUNCTIONS, rng), endless(WRITE_ASKS, rng), strict=False):
        signature, about, examples = split_function(row)
        name, params = without_types(signature).rstrip(")").split("(")
        values = {"{d}": about, "{f}": name, "{p}": params, "{a}": examples[0][0], "{r}": examples[0][1]}
        yield "".join(values.get(part, part) for part in re.split(r"(\{[dfpar]\})", ask))


def explain_code(rng: random.Random) -> Stream:
    """Ask about a snippet."""
    for ask, code in zip(endless(EXPLAIN_ASKS, rng), endless(SNIPPETS, rng), strict=False):
        yield f"{ask}\n\n```python\n{code}\n```" if rng.random() < 0.6 else f"{ask}\n\n{code}"


def programs(rng: random.Random) -> Stream:
    """Ask for a small program."""
    for ask, task in zip(endless(PROGRAM_ASKS, rng), endless(PROGRAMS, rng), strict=False):
        yield ask.replace("{d}", task)


def about_text(asks: Sequence[str], rng: random.Random) -> Stream:
    """Put a task before or after a short text."""
    for ask, text in zip(endless(asks, rng), filled(TEXTS, rng), strict=False):
        if rng.random() < 0.25:
            yield f"{text}\n\n{ask.replace(' below', ' above').replace('the following', 'it').replace(':', '.')}"
        else:
            yield f"{ask}\n\n{text}"


# Kind of prompt, its share in percent, and its stream.
SOURCES: list[tuple[str, float, Callable[[random.Random], Stream]]] = [
    ("math", 28.0, math_stories),
    ("code", 12.5, complete_code),
    ("code", 5.5, write_code),
    ("code", 3.4, explain_code),
    ("code", 2.6, programs),
    ("writing", 9.0, partial(ask_about, WRITING_ASKS, SUBJECTS)),
    ("writing", 2.4, partial(ask_about, EMAIL_ASKS, EMAILS)),
    ("roleplay", 4.8, partial(ask_about, ROLE_ASKS, PERSONAS)),
    ("reasoning", 4.2, partial(filled, PUZZLES)),
    ("extraction", 3.6, partial(about_text, EXTRACT_ASKS)),
    ("summary", 1.8, partial(about_text, SUMMARY_ASKS)),
    ("stem", 6.6, partial(ask_about, STEM_ASKS, STEM)),
    ("humanities", 5.8, partial(ask_about, HUMANITIES_ASKS, HUMANITIES)),
    ("howto", 2.6, partial(ask_about, HOWTO_ASKS, HOWTO)),
    ("comparison", 2.0, partial(ask_about, PAIR_ASKS, PAIRS)),
    ("brainstorm", 1.4, partial(ask_about, PLAN_ASKS, PLANS)),
    ("opinion", 1.4, partial(ask_about, OPINION_ASKS, OPINIONS)),
    ("outline", 1.0, partial(ask_about, OUTLINE_ASKS, STEM + HUMANITIES)),
    ("general", 1.4, partial(filled, CHAT_EXTRA)),
]


def build(total: int) -> list[dict[str, object]]:
    """Build the prompts, ordered such that every prefix has about the same mix of kinds."""
    rng = random.Random(0)
    seen: set[str] = set()
    placed: list[tuple[float, str, str]] = []
    for kind, share, source in SOURCES:
        quota = round(total * share / 100)
        stream = source(rng)
        kept = misses = 0
        while kept < quota and misses < 2000:
            prompt = next(stream).strip()
            if prompt.casefold() in seen:
                misses += 1
                continue
            seen.add(prompt.casefold())
            placed.append(((kept + rng.random()) / quota, kind, prompt))
            kept += 1
            misses = 0
    placed.sort()
    return [{"messages": [{"role": "user", "content": prompt}], "kind": kind} for _, kind, prompt in placed]


def main() -> None:
    """Write the prompts to the path given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help='path of the JSONL file, or "-" for standard output')
    parser.add_argument("--count", type=int, default=TOTAL, help="write only the first COUNT prompts (default: all %(default)s)")
    args = parser.parse_args()
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in build(max(TOTAL, args.count))[: args.count]]
    if args.out == "-":
        sys.stdout.writelines(lines)
    else:
        with open(args.out, "w", encoding="utf-8") as file:
            file.writelines(lines)


if __name__ == "__main__":
    main()
